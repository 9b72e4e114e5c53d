//! `--until`: the moment at which a run stops softly, in local time of the machine. Looks at the wall clock, so that a
//! machine that slept or whose clock was set stops when people expect it.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use croprow::error::Error;
use croprow::pipeline::stop::{Cause, Stop};
use jiff::civil::{DateTime, Time};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{Timestamp, ZonedDateTime};

use super::{say, signals};

/// Tells a child process the moment that its parent's command line means.
const MOMENT: &str = "CROPROW_UNTIL";

/// Between two looks at the clock.
const LOOK: Duration = Duration::from_millis(200);

/// Days that are tried for the next such time. No zone leaves out two days in a row.
const DAYS_AHEAD: usize = 3;

/// A moment as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// The next time that clocks show this.
    Next(Time),
    /// That moment.
    At(DateTime),
}

/// `07:00`, `7:00:30`, `2026-12-01T07:00`.
pub(crate) fn parse(text: &str) -> Result<Until, String> {
    let time = ["%H:%M", "%H:%M:%S"].iter().find_map(|form| Time::strptime(form, text).ok());
    let forms = ["%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S"];
    let at = || forms.iter().find_map(|form| DateTime::strptime(form, text).ok());
    time.map(Until::Next)
        .or_else(|| at().map(Until::At))
        .ok_or_else(|| "write a time as 07:00, or a moment as 2026-12-01T07:00".to_owned())
}

impl Until {
    /// The moment that is meant at `now`, which lies after it.
    ///
    /// # Errors
    /// It is past.
    pub(crate) fn after(self, now: &ZonedDateTime) -> Result<ZonedDateTime, Error> {
        match self {
            Self::At(at) => moment(at, now).ok_or_else(|| Error::Usage(format!("--until {at} is past"))),
            Self::Next(time) => {
                let days = std::iter::successors(Some(now.date()), |day| day.tomorrow().ok());
                days.take(DAYS_AHEAD)
                    .find_map(|day| moment(day.to_datetime(time), now))
                    .ok_or_else(|| Error::Usage(format!("--until {time}: clocks will not show this time soon")))
            }
        }
    }
}

/// When clocks show `at`, if that lies after `now`. A time that is left out when clocks go forward is the one they
/// show instead; of one that comes twice when they go back, the next.
fn moment(at: DateTime, now: &ZonedDateTime) -> Option<ZonedDateTime> {
    let zoned = now.time_zone().to_ambiguous_zoned_datetime(at);
    let candidates = match zoned.offset() {
        AmbiguousOffset::Unambiguous { .. } => vec![zoned.unambiguous()],
        AmbiguousOffset::Gap { .. } => vec![zoned.later()],
        AmbiguousOffset::Fold { .. } => vec![zoned.clone().earlier(), zoned.later()],
    };
    candidates.into_iter().flatten().find(|moment| moment > now)
}

/// Words for people.
pub(crate) fn words(moment: &ZonedDateTime) -> String {
    moment.strftime("%Y-%m-%d %H:%M %Z").to_string()
}

/// True from the moment on.
pub(super) fn has_come(moment: &ZonedDateTime) -> bool {
    Timestamp::now() >= moment.timestamp()
}

/// Lets `child` stop at the same moment: the time of its command line may come a second time.
pub(super) fn hand_down(child: &mut Command, moment: &ZonedDateTime) {
    child.env(MOMENT, moment.timestamp().to_string());
}

/// What a parent handed down.
pub(super) fn handed_down() -> Option<ZonedDateTime> {
    let moment: Timestamp = std::env::var(MOMENT).ok()?.parse().ok()?;
    Some(moment.to_zoned_datetime(TimeZone::system()))
}

/// Asks for a soft stop when the moment has come.
pub(crate) fn watch(stop: &Arc<Stop>, moment: &ZonedDateTime) -> Result<(), Error> {
    let (stop, moment) = (Arc::clone(stop), moment.clone());
    signals::spawn("until", move || {
        if wait(&stop, moment.timestamp(), Timestamp::now, || std::thread::sleep(LOOK)) {
            say(&format!("croprow: it is {} (--until): what is in flight ends within eight seconds", words(&moment)));
        }
    })
}

/// True when the moment came; false when the run stopped before.
fn wait(stop: &Stop, moment: Timestamp, clock: impl Fn() -> Timestamp, sleep: impl Fn()) -> bool {
    while clock() < moment {
        if stop.is_asked() {
            return false;
        }
        sleep();
    }
    stop.ask(Cause::Until);
    true
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Central Europe: forward at 02:00 on 2026-03-29, back at 03:00 on 2026-10-25.
    fn berlin(now: &str) -> ZonedDateTime {
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        now.parse::<Timestamp>().unwrap().to_zoned_datetime(zone)
    }

    fn after(until: &str, now: &str) -> String {
        parse(until).unwrap().after(&berlin(now)).unwrap().timestamp().to_string()
    }

    #[test]
    fn a_time_is_the_next_such_moment() {
        assert_eq!(after("07:00", "2026-11-30T22:00:00Z"), "2026-12-01T06:00:00Z", "tomorrow morning");
        assert_eq!(after("7:00", "2026-12-01T05:59:59Z"), "2026-12-01T06:00:00Z", "this morning");
        assert_eq!(after("07:00", "2026-12-01T06:00:00Z"), "2026-12-02T06:00:00Z", "it is seven now");
        assert_eq!(after("07:00:30", "2026-12-01T06:00:00Z"), "2026-12-01T06:00:30Z");
        assert_eq!(after("00:00", "2026-12-31T12:00:00Z"), "2026-12-31T23:00:00Z", "the end of the year");
        assert_eq!(after("2026-12-02T07:00", "2026-11-30T22:00:00Z"), "2026-12-02T06:00:00Z");
        let past = parse("2026-11-30T07:00").unwrap().after(&berlin("2026-11-30T22:00:00Z")).unwrap_err();
        assert!(past.exit_code() == 1 && past.to_string().contains("past"), "{past}");
    }

    #[test]
    fn a_night_in_which_clocks_change_ends_when_they_show_the_time() {
        assert_eq!(after("07:00", "2026-03-28T21:00:00Z"), "2026-03-29T05:00:00Z", "an hour less");
        assert_eq!(after("07:00", "2026-10-24T20:00:00Z"), "2026-10-25T06:00:00Z", "an hour more");
        assert_eq!(after("02:30", "2026-03-28T21:00:00Z"), "2026-03-29T01:30:00Z", "left out: clocks show 03:30");
        assert_eq!(after("02:30", "2026-10-24T20:00:00Z"), "2026-10-25T00:30:00Z", "the first of two");
        assert_eq!(after("02:30", "2026-10-25T00:45:00Z"), "2026-10-25T01:30:00Z", "the second of two");
        assert_eq!(after("2026-10-25T02:30", "2026-10-25T00:45:00Z"), "2026-10-25T01:30:00Z");
    }

    #[test]
    fn what_is_no_time_is_refused_with_what_would_be() {
        for text in
            ["", "7", "25:00", "07:60", "24:00", "tomorrow", "2026-13-01T07:00", "2026-12-01", "07:00Z", "-1:00"]
        {
            assert!(parse(text).unwrap_err().contains("07:00"), "{text}");
        }
    }

    #[test]
    fn the_stop_comes_with_the_moment_and_not_when_another_came_first() {
        let second = |s: i64| Timestamp::from_second(s).unwrap();
        let stop = Stop::default();
        let clock = Cell::new(0);
        // The machine sleeps through the moment.
        let came = wait(&stop, second(100), || second(clock.get()), || clock.set(clock.get() + 70));
        assert!(came && clock.get() == 140 && stop.cause() == Some(&Cause::Until));
        let stopped = Stop::default();
        let signal = || stopped.ask(Cause::Signal(2));
        assert!(!wait(&stopped, second(100), || second(0), signal));
        assert_eq!(stopped.cause(), Some(&Cause::Signal(2)));
    }
}
