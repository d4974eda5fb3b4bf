//! What metrics are written to, and the text format of Prometheus, version 0.0.4.

use std::fmt::Write;

use crate::model::meter::{BOUNDS_MICROS, HistogramView};

/// What [`Text`] writes is this.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A metric's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Labels of a sample.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// Takes metrics: the head of a family first, then all its samples.
pub trait Sink {
    fn head(&mut self, name: &str, kind: Kind, about: &str);
    fn sample(&mut self, name: &str, labels: Labels, value: f64);
    fn histogram(&mut self, name: &str, labels: Labels, view: &HistogramView);
}

/// An exposition in the making.
#[derive(Debug, Default)]
pub struct Text {
    text: String,
}

impl Sink for Text {
    fn head(&mut self, name: &str, kind: Kind, about: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "# HELP {name} {about}.\n# TYPE {name} {}", kind.name());
    }

    fn sample(&mut self, name: &str, labels: Labels, value: f64) {
        self.series(name, "", labels, None);
        let _ = writeln!(self.text, " {value}");
    }

    fn histogram(&mut self, name: &str, labels: Labels, view: &HistogramView) {
        let mut total = 0;
        let bounds = BOUNDS_MICROS.iter().map(|micros| format!("{}", *micros as f64 / 1e6)).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(view.buckets) {
            total += count;
            self.series(name, "_bucket", labels, Some(&bound));
            let _ = writeln!(self.text, " {total}");
        }
        self.series(name, "_sum", labels, None);
        let _ = writeln!(self.text, " {}", view.sum.as_secs_f64());
        self.series(name, "_count", labels, None);
        let _ = writeln!(self.text, " {total}");
    }
}

impl Text {
    fn series(&mut self, name: &str, suffix: &str, labels: Labels, bound: Option<&str>) {
        self.text.push_str(name);
        self.text.push_str(suffix);
        let all = labels.iter().copied().chain(bound.map(|bound| ("le", bound)));
        let mut before = '{';
        for (label, value) in all {
            self.text.push(before);
            before = ',';
            self.text.push_str(label);
            self.text.push_str("=\"");
            for letter in value.chars() {
                match letter {
                    '\\' => self.text.push_str("\\\\"),
                    '"' => self.text.push_str("\\\""),
                    '\n' => self.text.push_str("\\n"),
                    letter => self.text.push(letter),
                }
            }
            self.text.push('"');
        }
        if before == ',' {
            self.text.push('}');
        }
    }

    pub fn into_string(self) -> String {
        self.text
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::meter::Histogram;

    #[test]
    fn samples_and_their_labels_are_written_as_prometheus_reads_them() {
        let mut text = Text::default();
        text.head("a_total", Kind::Counter, "All of it");
        text.sample("a_total", &[], 3.0);
        text.sample("a_total", &[("b", "x\"\\\ny"), ("c", "")], 1.5);
        let expected = "# HELP a_total All of it.\n# TYPE a_total counter\na_total 3\na_total{b=\"x\\\"\\\\\\ny\",c=\"\"} 1.5\n";
        assert_eq!(text.into_string(), expected);
    }

    #[test]
    fn buckets_are_cumulated_up_to_infinity() {
        let histogram = Histogram::default();
        [50, 200, 200_000_000].into_iter().for_each(|micros| histogram.observe(Duration::from_micros(micros)));
        let mut text = Text::default();
        text.histogram("t_seconds", &[("m", "P")], &histogram.view());
        let text = text.into_string();
        for line in [
            "t_seconds_bucket{m=\"P\",le=\"0.0001\"} 1",
            "t_seconds_bucket{m=\"P\",le=\"0.00025\"} 2",
            "t_seconds_bucket{m=\"P\",le=\"100\"} 2",
            "t_seconds_bucket{m=\"P\",le=\"+Inf\"} 3",
            "t_seconds_sum{m=\"P\"} 200.00025",
            "t_seconds_count{m=\"P\"} 3",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }
}
