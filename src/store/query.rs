//! What `plantstore list` and `plantstore stats` ask of a store: filters, cursors and statistics, the same for both engines.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use serde::Serialize;

/// The number of tags in the statistics: those of the most plants.
pub(crate) const TAGS_MAX: u32 = 10;

/// The number of days in the statistics.
const DAYS: i64 = 14;

const DAY_MICROSECONDS: i64 = 86_400_000_000;

/// The years 1 to 9999, which every engine supports.
pub(crate) const TIME_MIN: i64 = -62_135_596_800_000_000;
pub(crate) const TIME_MAX: i64 = 253_402_200_000_000_000;

/// The position of a plant in the order of `plantstore list`: by batch, then by time, then by id. A page begins after its cursor, which
/// is the last plant of the page before (keyset pagination).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cursor {
    /// The number of the transaction that added the plant; 0 in PostgreSQL, which orders plants by time alone.
    pub(crate) batch: i64,
    /// When it was added, in microseconds since 1970.
    pub(crate) microsecond: i64,
    pub(crate) id: i64,
}

impl Cursor {
    /// After every plant, so that a list begins with the newest.
    pub(crate) const END: Self = Self {
        batch: i64::MAX,
        microsecond: TIME_MAX,
        id: i64::MIN,
    };
}

/// Such as 2026-11-15T12:00:07.123Z/42: the time and the id, and the batch unless it is 0.
impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let clamped = self.microsecond.clamp(TIME_MIN, TIME_MAX);
        let time = Timestamp::from_microsecond(clamped).expect("clamped to valid times");
        write!(f, "{time}/{}", self.id)?;
        match self.batch {
            0 => Ok(()),
            batch => write!(f, "/{batch}"),
        }
    }
}

impl FromStr for Cursor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = text.split_once('/').and_then(|(time, id)| {
            let (id, batch) = id.split_once('/').unwrap_or((id, "0"));
            Some(Self {
                batch: batch.parse().ok()?,
                microsecond: microsecond(time.parse().ok()?),
                id: id.parse().ok()?,
            })
        });
        parsed
            .ok_or_else(|| "expected a time and an id, such as 2026-11-15T12:00:00Z/42".to_owned())
    }
}

/// Converts a time to microseconds since 1970: rounds up, so that a plant added within the last microsecond is still before it, and
/// clamps to the times that every engine supports.
fn microsecond(time: Timestamp) -> i64 {
    let rounded_up = time.as_microsecond() + i64::from(time.subsec_nanosecond() % 1000 > 0);
    rounded_up.clamp(TIME_MIN, TIME_MAX)
}

/// The plants that are listed: those that meet all conditions.
#[derive(Debug, Clone, Default)]
pub(crate) struct Filter {
    /// Added at this time or later.
    pub since: Option<Timestamp>,
    /// Added before this time.
    pub until: Option<Timestamp>,
    pub tag: Option<TagFilter>,
    /// The name contains this. ASCII letters are case-insensitive; all other characters match exactly.
    pub name_contains: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TagFilter {
    Equals(String),
    Untagged,
}

impl Filter {
    /// The first microsecond of the range, and the first one after it.
    pub(crate) fn time_range(&self) -> (i64, i64) {
        (
            self.since.map_or(TIME_MIN, microsecond),
            self.until.map_or(TIME_MAX, microsecond),
        )
    }

    /// True if every plant is listed.
    pub(crate) fn is_any(&self) -> bool {
        self.is_by_time() && self.since.is_none() && self.until.is_none()
    }

    /// True if an index by time is enough to find the plants.
    pub(crate) fn is_by_time(&self) -> bool {
        self.tag.is_none() && self.name_contains.is_none()
    }

    /// True if name and tag meet the conditions.
    pub(crate) fn matches(&self, name: &str, tag: Option<&str>) -> bool {
        let has_tag = match &self.tag {
            None => true,
            Some(TagFilter::Equals(expected)) => tag == Some(expected),
            Some(TagFilter::Untagged) => tag.is_none(),
        };
        has_tag
            && self
                .name_contains
                .as_ref()
                .is_none_or(|part| contains(name.as_bytes(), part.as_bytes()))
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    part.is_empty()
        || text
            .windows(part.len())
            .any(|window| window.eq_ignore_ascii_case(part))
}

/// Counts of all plants, as `plantstore stats --json` prints them.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Statistics {
    pub plants: u64,
    /// Plants that are not what was stored, and are not counted below.
    #[serde(skip)]
    pub damaged: u64,
    pub untagged: u64,
    /// The tags of the most plants.
    pub tags: Vec<TagCount>,
    /// Plants with a tag that is not among those.
    pub other_tags: u64,
    /// Revoked tokens included.
    pub tokens: u64,
    /// None if the engine does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub database_bytes: Option<u64>,
    /// None if the WAL is not a file of ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wal_bytes: Option<u64>,
    /// The last days, today last.
    pub days: Vec<DayCount>,
    /// Plants that are dated after today: the clock was wrong when they were added, or is wrong now.
    pub future: u64,
    /// The first of the days, counted from 1970 in UTC.
    #[serde(skip)]
    first_day: i64,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct TagCount {
    pub tag: String,
    pub plants: u64,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DayCount {
    pub day: Date,
    pub added: u64,
}

impl Statistics {
    /// Statistics without plants, for the days up to this one.
    pub(crate) fn until(now: Timestamp) -> Self {
        let today = now.as_microsecond().div_euclid(DAY_MICROSECONDS);
        let first_day = today - DAYS + 1;
        let day = |day| DayCount {
            day: start_of_day(day).to_zoned(TimeZone::UTC).date(),
            added: 0,
        };
        Self {
            days: (first_day..=today).map(day).collect(),
            first_day,
            ..Self::default()
        }
    }

    /// Sets the tags of the most plants, once all plants are counted.
    pub(crate) fn set_tags(&mut self, tags: Vec<TagCount>) {
        let shown: u64 = tags.iter().map(|tag| tag.plants).sum();
        let others = self.untagged + self.damaged + shown;
        self.other_tags = self.plants.saturating_sub(others);
        self.tags = tags;
    }

    pub(crate) fn first_day_start(&self) -> Timestamp {
        start_of_day(self.first_day)
    }

    /// Counts plants that were added on a day, counted from 1970 in UTC.
    pub(crate) fn count_day(&mut self, day: i64, plants: u64) {
        let Ok(position) = usize::try_from(day.saturating_sub(self.first_day)) else {
            return; // before the first of these days
        };
        match self.days.get_mut(position) {
            Some(day) => day.added += plants,
            None => self.future += plants,
        }
    }
}

fn start_of_day(day: i64) -> Timestamp {
    Timestamp::from_microsecond(day * DAY_MICROSECONDS).expect("within two weeks of the clock")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_is_written() {
        for text in [
            "2026-11-15T12:00:07.123456Z/42",
            "2026-11-15T12:00:07.123Z/-42/17",
            "2026-11-15T12:00:07Z/-9223372036854775808",
        ] {
            let cursor: Cursor = text.parse().expect("a cursor");
            assert_eq!(cursor.to_string(), text);
        }
        for bad in [
            "",
            "/",
            "2026-11-15T12:00:07Z",
            "42",
            "now/42",
            "2026-11-15T12:00:07Z/x",
            "2026-11-15T12:00:07Z/1/x",
        ] {
            assert!(bad.parse::<Cursor>().is_err(), "{bad}");
        }
    }

    #[test]
    fn times_are_clamped_to_what_every_engine_supports() {
        for time in [Timestamp::MIN, Timestamp::UNIX_EPOCH, Timestamp::MAX] {
            assert!((TIME_MIN..=TIME_MAX).contains(&microsecond(time)));
        }
        let first = Timestamp::from_microsecond(TIME_MIN).expect("a time");
        assert_eq!(first.to_string(), "0001-01-01T00:00:00Z");
        assert!(Cursor::END.to_string().starts_with("9999-12-3"));
    }

    #[test]
    fn a_name_is_matched_in_either_case_of_ascii_letters() {
        let matches = |part: &str, name: &str| {
            let filter = Filter {
                name_contains: Some(part.to_owned()),
                ..Filter::default()
            };
            filter.matches(name, None)
        };
        assert!(matches("", "") && matches("", "Ivy") && matches("IV", "Ivy"));
        assert!(matches("é", "Né") && !matches("É", "Né"));
        assert!(!matches("Ivy", "Iv"));
    }

    #[test]
    fn the_last_days_end_today() {
        let now: Timestamp = "2026-11-15T23:59:59.999Z".parse().expect("a time");
        let empty = || Statistics::until(now);
        assert_eq!(
            empty().first_day_start().to_string(),
            "2026-11-02T00:00:00Z"
        );
        let days = empty().days;
        assert_eq!(days.len(), 14);
        assert_eq!(days[13].day.to_string(), "2026-11-15");
        let counted = |day: i64| {
            let mut statistics = empty();
            statistics.count_day(day, 1);
            let position = statistics.days.iter().position(|day| day.added == 1);
            (position, statistics.future)
        };
        let first = empty().first_day;
        let today = first + 13;
        assert_eq!(counted(today), (Some(13), 0));
        assert_eq!(counted(first), (Some(0), 0));
        assert_eq!(counted(first - 1), (None, 0));
        assert_eq!(counted(i64::MIN), (None, 0));
        assert_eq!(counted(today + 1), (None, 1));
        assert_eq!(counted(i64::MAX), (None, 1));
    }
}
