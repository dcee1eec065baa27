//! Looking for plants, the same for every kind of store: where a plant stands by time, which ones are wanted, and what
//! there is to say of all of them.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;

use crate::plant::Plant;

/// How many tags are told apart in the statistics: those of the most plants.
pub const TAGS_MAX: u32 = 10;

/// For how many days the statistics tell what was added.
pub const DAYS: usize = 14;

const DAY_MICROSECONDS: i64 = 86_400_000_000;

/// The position of a plant in the order of `plantstore list`: by batch, then by time, then by id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor {
    /// The number of the transaction that added it; 0 in a store that orders plants by time alone.
    pub batch: i64,
    /// When it was added: microseconds since 1970, as precise as any store is.
    pub microsecond: i64,
    /// Its id.
    pub id: i64,
}

impl Cursor {
    /// Before every plant, and within what every engine takes for a time: the year 1.
    pub const FIRST: Self = Self {
        batch: 0,
        microsecond: -62_135_596_800_000_000,
        id: i64::MIN,
    };
    /// After every plant: in the year 9999.
    pub const END: Self = Self {
        batch: i64::MAX,
        microsecond: 253_402_200_000_000_000,
        id: i64::MIN,
    };

    /// The first position of this time in a store that orders plants by time alone. In any store it stands for the time.
    pub fn at(time: Timestamp) -> Self {
        let microsecond = time.as_microsecond();
        // What is left of the moment below a microsecond is over.
        let rounded_up = microsecond + i64::from(time.subsec_nanosecond() % 1000 > 0);
        Self {
            batch: 0,
            microsecond: rounded_up.clamp(Self::FIRST.microsecond, Self::END.microsecond),
            id: i64::MIN,
        }
    }

    /// The moment.
    pub fn time(&self) -> Timestamp {
        let clamped = self
            .microsecond
            .clamp(Self::FIRST.microsecond, Self::END.microsecond);
        Timestamp::from_microsecond(clamped).expect("within the range of times")
    }
}

/// Such as 2026-11-15T12:00:07.123Z/42: the time and the id, and if it is not 0 the batch.
impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.time(), self.id)?;
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
            let place = Self::at(time.parse().ok()?);
            let (id, batch) = id.split_once('/').unwrap_or((id, "0"));
            Some(Self {
                batch: batch.parse().ok()?,
                id: id.parse().ok()?,
                ..place
            })
        });
        parsed
            .ok_or_else(|| "expected a time and an id, such as 2026-11-15T12:00:00Z/42".to_owned())
    }
}

/// Which plants are looked for.
#[derive(Debug, Clone)]
pub struct Filter {
    /// Added at this time or later.
    pub since: Cursor,
    /// Added before this time.
    pub until: Cursor,
    /// At an earlier position than this one.
    pub before: Cursor,
    /// With this tag.
    pub tag: Option<String>,
    /// With this in their name, just as it is written.
    pub name_part: Option<String>,
}

impl Filter {
    /// Whether this is one of them, as far as its own words go.
    pub fn matches(&self, plant: &Plant) -> bool {
        let with_tag = self.tag.is_none() || self.tag == plant.tag;
        let part = self.name_part.as_deref();
        with_tag && part.is_none_or(|part| plant.name.contains(part))
    }

    /// Whether every plant of the time is one of them.
    pub fn is_any(&self) -> bool {
        self.tag.is_none() && self.name_part.is_none()
    }
}

/// How far a walk from plant to plant has come.
#[derive(Debug)]
pub struct Walk {
    /// Those that are wanted, newest first.
    pub found: Vec<Cursor>,
    /// How many were looked at.
    pub looked_at: u64,
    /// The last of them; none, if there are no more.
    pub last: Option<Cursor>,
}

/// What there is to say of all plants.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// How many there are.
    pub plants: u64,
    /// How many of them are no longer what was stored, and counted nowhere else.
    pub damaged: u64,
    /// How many have no tag.
    pub without_tag: u64,
    /// The tags of the most plants, and of how many: those of which that is certain.
    pub tags: Vec<(String, u64)>,
    /// How many plants were added on each of the last days, today last.
    pub days: [u64; DAYS],
    /// How many plants are dated after today: the clock was wrong when they were added, or is wrong now.
    pub future: u64,
    /// How many tokens there are, revoked ones included.
    pub tokens: u64,
    /// What the plants and tokens take on disk, as far as the store can tell.
    pub database_bytes: Option<u64>,
    /// What the log takes beside that, if it is a file of ours.
    pub wal_bytes: Option<u64>,
}

impl Statistics {
    /// Counts plants that were added on a day, counted from 1970.
    pub fn count_day(&mut self, days: Days, day: i64, plants: u64) {
        match usize::try_from(day.saturating_sub(days.first)) {
            Ok(position) if position < DAYS => self.days[position] += plants,
            Ok(_) => self.future += plants,
            Err(_) => {} // before the first of these days
        }
    }
}

/// The last days, in UTC, today last.
#[derive(Debug, Clone, Copy)]
pub struct Days {
    first: i64,
}

impl Days {
    /// Up to this moment.
    pub fn until(now: Timestamp) -> Self {
        let today = Self::of(now.as_microsecond());
        let before = i64::try_from(DAYS).expect("a few") - 1;
        Self {
            first: today - before,
        }
    }

    /// When the first of them begins.
    pub fn begin(self) -> Timestamp {
        Timestamp::from_microsecond(self.first * DAY_MICROSECONDS).expect("not long ago")
    }

    /// The day of this time, counted from 1970.
    pub fn of(microsecond: i64) -> i64 {
        microsecond.div_euclid(DAY_MICROSECONDS)
    }

    /// When each begins.
    pub fn each(self) -> impl Iterator<Item = Timestamp> {
        (self.first..)
            .take(DAYS)
            .map(|day| Timestamp::from_microsecond(day * DAY_MICROSECONDS).expect("not long ago"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_as_it_is_written() {
        for text in [
            "2026-11-15T12:00:07.123456Z/42",
            "2026-11-15T12:00:07.123Z/-42/17",
            "2026-11-15T12:00:07Z/-9223372036854775808",
        ] {
            let place: Cursor = text.parse().expect("a place");
            assert_eq!(place.to_string(), text);
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
    fn places_stand_between_the_first_and_the_end() {
        for time in [Timestamp::MIN, Timestamp::UNIX_EPOCH, Timestamp::MAX] {
            let place = Cursor::at(time);
            assert!(place >= Cursor::FIRST && place <= Cursor::END);
        }
        assert_eq!(Cursor::FIRST.time().to_string(), "0001-01-01T00:00:00Z");
        assert!(Cursor::END.time().to_string().starts_with("9999-12-3"));
    }

    #[test]
    fn the_last_days_end_today() {
        let now: Timestamp = "2026-11-15T23:59:59.999Z".parse().expect("a time");
        let days = Days::until(now);
        assert_eq!(days.begin().to_string(), "2026-11-02T00:00:00Z");
        assert_eq!(days.each().count(), DAYS);
        let counted = |microsecond: i64| {
            let mut statistics = Statistics::default();
            statistics.count_day(days, Days::of(microsecond), 1);
            let position = statistics.days.iter().position(|plants| *plants == 1);
            (position, statistics.future)
        };
        let begin = days.begin().as_microsecond();
        assert_eq!(counted(now.as_microsecond()), (Some(DAYS - 1), 0));
        assert_eq!(counted(begin), (Some(0), 0));
        assert_eq!(counted(begin - 1), (None, 0));
        assert_eq!(counted(i64::MIN), (None, 0));
        assert_eq!(counted(now.as_microsecond() + 1000), (None, 1));
        assert_eq!(counted(i64::MAX), (None, 1));
    }
}
