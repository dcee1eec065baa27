//! The status page: what the node is doing now and did in the last hours. The page is complete without its script, which adds the
//! charts. The same numbers are in `/status.txt`, for terminals.

use std::fmt::Write;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use serde::Serialize;

use crate::html::{escape, fill};
use crate::logging::Warning;
use crate::ops::history::{CHARTS, History, Point, Ring, Unit, Values, lines_of};
use crate::version::VERSION;
use crate::web_page::ICON;

const TEMPLATE: &str = include_str!("status_page/page.html");

/// Path, media type and content.
#[rustfmt::skip] // a table
pub(super) const FILES: [(&str, &str, &str); 3] = [
    ("/status.css", "text/css; charset=utf-8", concat!(include_str!("../palette.css"), include_str!("status_page/page.css"))),
    ("/status.js", "text/javascript; charset=utf-8", include_str!("status_page/page.js")),
    ("/status.svg", "image/svg+xml", ICON),
];

/// The columns of the table of numbers, and the resolution that they are calculated from.
const PERIODS: [(&str, Duration, usize); 5] = [
    ("now", Duration::from_secs(1), 0),
    ("1 min", Duration::from_secs(60), 0),
    ("15 min", Duration::from_secs(15 * 60), 0),
    ("1 h", Duration::from_secs(60 * 60), 1),
    ("24 h", Duration::from_secs(24 * 60 * 60), 1),
];

/// What the numbers mean, on the page and in a terminal.
const HINT: &str = "\
Rates and CPU (cores in use) are averages of the period, or since the start if
that is shorter. Other numbers are the highest of its seconds. Beyond 15 min
they are those of complete intervals of ten seconds. “–” means that there was
nothing to measure.";

/// A cell without a value.
const NOTHING: &str = "–";

/// What the page shows.
pub(super) struct Status<'a> {
    /// Why the node is not ready.
    pub(super) not_ready: Option<String>,
    pub(super) started_at: SystemTime,
    pub(super) history: &'a History,
    pub(super) settings: &'a [(String, String)],
    /// The newest one first.
    pub(super) warnings: Vec<Warning>,
}

/// A row of the table of numbers.
struct Row {
    chart: &'static str,
    line: String,
    cells: [String; PERIODS.len()],
}

impl Row {
    /// True if it is a rate of something that did not happen, such as most outcomes of adds.
    fn never_happened(&self) -> bool {
        let none = Unit::PerSecond.text(0.0);
        self.cells
            .iter()
            .all(|cell| *cell == none || cell == NOTHING)
    }
}

impl Status<'_> {
    pub(super) fn html(&self) -> String {
        let state = match &self.not_ready {
            None => r#"<p class="ready">Ready</p>"#.to_owned(),
            Some(reason) => {
                let reason = escape(reason);
                format!(r#"<p class="not-ready"><strong>Not ready:</strong> {reason}</p>"#)
            }
        };
        let values = [
            ("version", escape(VERSION)),
            ("uptime", self.uptime()),
            ("started", rounded(self.started_at)),
            ("time", rounded(SystemTime::now())),
            ("state", state),
            ("hint", escape(HINT)),
            ("numbers", self.numbers_html()),
            ("warnings", self.warnings_html()),
            ("settings", self.settings_html()),
        ];
        fill(TEMPLATE, &values).expect("the template has these names")
    }

    pub(super) fn text(&self) -> String {
        let mut text = match &self.not_ready {
            None => "ready".to_owned(),
            Some(reason) => format!("not ready: {reason}"),
        };
        let _ = write!(
            text,
            "\nplantstore {VERSION}, running for {}\n\n",
            self.uptime()
        );
        let mut rows = self.rows();
        rows.retain(|row| row.line == "added" || !row.never_happened());
        let name = |row: &Row| format!("{}, {}", row.chart, row.line);
        let name_width = rows
            .iter()
            .map(|row| name(row).len())
            .max()
            .unwrap_or_default();
        let _ = write!(text, "{:name_width$}", "");
        for (period, ..) in PERIODS {
            let _ = write!(text, "{period:>10}");
        }
        text.push('\n');
        for row in &rows {
            let _ = write!(text, "{:name_width$}", name(row));
            for cell in &row.cells {
                let _ = write!(text, "{cell:>10}");
            }
            text.push('\n');
        }
        let _ = writeln!(text, "\n{HINT}");
        if !self.warnings.is_empty() {
            text.push_str("\nNewest warnings:\n");
        }
        for Warning { time, text: line } in self.warnings.iter().take(10) {
            let _ = writeln!(text, "{} {line}", rounded(*time));
        }
        text
    }

    fn uptime(&self) -> String {
        let seconds = self.started_at.elapsed().unwrap_or_default().as_secs();
        let (days, hours, minutes) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60);
        match (days, hours, minutes) {
            (0, 0, 0) => format!("{seconds} s"),
            (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
            (0, ..) => format!("{hours} h {minutes} min"),
            _ => format!("{days} d {hours} h"),
        }
    }

    fn rows(&self) -> Vec<Row> {
        // In the order of the longest period, which has all error codes.
        let all = CHARTS.iter().map(|chart| {
            let of_period = |(_, period, ring): (&str, Duration, usize)| {
                lines_of(chart, self.history.0[ring].within(period))
            };
            (chart, PERIODS.map(of_period))
        });
        let mut rows = Vec::new();
        for (chart, periods) in all {
            let mut names: Vec<&str> = Vec::new();
            for line in periods.iter().flatten() {
                if !names.contains(&line.name.as_str()) {
                    names.push(&line.name);
                }
            }
            for name in names {
                let cell = |lines: &Vec<Values>| {
                    let line = lines.iter().find(|line| line.name == *name);
                    let value = line.and_then(|line| chart.unit.summary(&line.values));
                    value.map_or(NOTHING.to_owned(), |value| chart.unit.text(value))
                };
                rows.push(Row {
                    chart: chart.title,
                    line: name.to_owned(),
                    cells: periods.each_ref().map(cell),
                });
            }
        }
        rows
    }

    fn numbers_html(&self) -> String {
        let mut html = String::from("<thead><tr><th scope=\"col\">Number</th>");
        for (period, ..) in PERIODS {
            let _ = write!(html, "<th scope=\"col\">{period}</th>");
        }
        html.push_str("</tr></thead><tbody>");
        for row in self.rows() {
            let _ = write!(
                html,
                "<tr><th scope=\"row\">{}, {}</th>",
                row.chart, row.line
            );
            for cell in row.cells {
                let _ = write!(html, "<td>{cell}</td>");
            }
            html.push_str("</tr>");
        }
        html + "</tbody>"
    }

    fn warnings_html(&self) -> String {
        if self.warnings.is_empty() {
            return "<p>None since the start.</p>".to_owned();
        }
        let mut html = String::from("<ol>");
        for Warning { time, text } in &self.warnings {
            let (time, text) = (rounded(*time), escape(text));
            let _ = write!(html, "<li><time>{time}</time> {text}</li>");
        }
        html + "</ol>"
    }

    fn settings_html(&self) -> String {
        let rows = self.settings.iter().map(|(name, value)| {
            let value = if value.is_empty() { "not set" } else { value };
            let (name, value) = (escape(name), escape(value));
            format!("<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>")
        });
        rows.collect()
    }
}

/// The points that a chart does not have yet.
#[derive(Serialize)]
pub(super) struct Points {
    started_at: u64,
    interval_s: u64,
    /// The number of the first point, and of the one after the last.
    first: u64,
    next: u64,
    times: Vec<u64>,
    charts: Vec<ChartPoints>,
}

#[derive(Serialize)]
struct ChartPoints {
    id: &'static str,
    title: &'static str,
    unit: Unit,
    lines: Vec<(String, Vec<Option<f64>>)>,
}

impl Points {
    pub(super) fn new(ring: &Ring, first: u64, started_at: SystemTime) -> Self {
        let points = ring.since(first);
        let times: Vec<u64> = points
            .clone()
            .map(|point: &Point| unix(point.time))
            .collect();
        let charts = CHARTS.iter().map(|chart| {
            let lines = lines_of(chart, points.clone()).into_iter();
            let digits = |value: Option<f32>| value.map(four_digits);
            ChartPoints {
                id: chart.id,
                title: chart.title,
                unit: chart.unit,
                lines: lines
                    .map(|line| (line.name, line.values.into_iter().map(digits).collect()))
                    .collect(),
            }
        });
        Self {
            started_at: unix(started_at),
            interval_s: ring.interval.as_secs(),
            first: ring.next - times.len() as u64,
            next: ring.next,
            charts: charts.collect(),
            times,
        }
    }
}

impl Unit {
    /// The value of a period: the average of a rate, the highest one of anything else.
    fn summary(self, values: &[Option<f32>]) -> Option<f64> {
        let values = values.iter().flatten().map(|value| f64::from(*value));
        match self {
            Self::PerSecond | Self::Cores => {
                let (count, sum) =
                    values.fold((0.0, 0.0), |(count, sum), value| (count + 1.0, sum + value));
                (count > 0.0).then(|| sum / count)
            }
            _ => values.reduce(f64::max),
        }
    }

    fn text(self, value: f64) -> String {
        match self {
            Self::PerSecond => format!("{}/s", number(value)),
            Self::Seconds if value < 1e-3 => format!("{} µs", number(value * 1e6)),
            Self::Seconds if value < 1.0 => format!("{} ms", number(value * 1e3)),
            Self::Seconds => format!("{} s", number(value)),
            Self::Plants | Self::Connections | Self::Cores => number(value),
            Self::Bytes if value < 1e6 => format!("{} kB", number(value / 1e3)),
            Self::Bytes if value < 1e9 => format!("{} MB", number(value / 1e6)),
            Self::Bytes => format!("{} GB", number(value / 1e9)),
        }
    }
}

/// Three digits, and all of those before the decimal point, in groups. A whole number has no others.
fn number(value: f64) -> String {
    if value >= 100.0 || value.fract() == 0.0 {
        let digits = format!("{value:.0}");
        let mut grouped = String::new();
        for (index, digit) in digits.chars().enumerate() {
            if index > 0 && (digits.len() - index).is_multiple_of(3) {
                grouped.push(',');
            }
            grouped.push(digit);
        }
        grouped
    } else if value >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

fn four_digits(value: f32) -> f64 {
    let value = f64::from(value);
    if value == 0.0 {
        return 0.0;
    }
    let scale = 10_f64.powf(3.0 - value.abs().log10().floor());
    (value * scale).round() / scale
}

fn unix(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

/// `2026-11-18 12:00:07Z`
fn rounded(time: SystemTime) -> String {
    let time = i64::try_from(unix(time)).unwrap_or_default();
    let time = Timestamp::from_second(time).unwrap_or(Timestamp::MAX);
    time.strftime("%F %TZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_groups() {
        for (value, text) in [
            (0.0, "0"),
            (2.0, "2"),
            (0.123_4, "0.12"),
            (12.34, "12.3"),
            (123.4, "123"),
            (1234.0, "1,234"),
            (1_234_567.0, "1,234,567"),
        ] {
            assert_eq!(number(value), text);
        }
        assert_eq!(Unit::Seconds.text(0.000_25), "250 µs");
        assert_eq!(Unit::Seconds.text(0.0123), "12.3 ms");
        assert_eq!(Unit::Bytes.text(7.39e9), "7.39 GB");
    }

    #[test]
    fn the_average_of_a_rate_and_the_highest_of_other_values() {
        let values = [Some(1.0), None, Some(3.0)];
        assert_eq!(Unit::PerSecond.summary(&values), Some(2.0));
        assert_eq!(Unit::Seconds.summary(&values), Some(3.0));
        assert_eq!(Unit::Seconds.summary(&[None]), None);
    }
}
