//! A system that is short of something: no image is to blame. The scenario is this test program once more, because its
//! limits are those of a process.

use std::fs::File;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use croprow::error::Error;
use croprow::pipeline::stop::Stop;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::support::dump::{assert_sound, number};
use crate::support::fake::{Behaviour, Setup, run, run_until};
use crate::support::photos;

/// Says to the scenario that it has a process of its own.
const OWN_PROCESS: &str = "CROPROW_TEST_SHORTAGE";

#[test]
fn a_process_that_may_open_no_more_files_ends_the_run_marks_no_image_and_the_next_run_goes_on() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["shortage::no_more_open_files", "--exact", "--ignored", "--nocapture"]).env(OWN_PROCESS, "1");
    let output = child.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "a scenario of the test above"]
fn no_more_open_files() {
    if std::env::var_os(OWN_PROCESS).is_none() {
        return;
    }
    let (_folder, db, _) = photos(300);
    let count = |condition: &str| number(&db, &format!("SELECT count(*) FROM images WHERE {condition}"));
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(128), maximum: limit.maximum }).unwrap();
    let behaviour = Behaviour { call: Duration::from_millis(10), ..Behaviour::default() };
    let (stop, over) = (Stop::default(), AtomicBool::new(false));
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            while count("embed_state = 'done'") == 0 {
                std::thread::yield_now();
            }
            let mut taken = Vec::new();
            while !stop.is_asked() && !over.load(Ordering::SeqCst) {
                match File::open("/dev/null") {
                    Ok(file) => taken.push(file),
                    Err(_) => std::thread::sleep(Duration::from_micros(50)),
                }
            }
        });
        let result = run_until(&db, &Setup { behaviour, ..Setup::default() }, &stop);
        over.store(true, Ordering::SeqCst);
        result
    });
    let failed = count("'failed' IN (detect_state, embed_state)");
    assert_eq!(failed, 0, "{result:?}");
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Shortage(_)) && error.exit_code() == 3, "{error}");
    assert!(error.to_string().contains(".png: Too many open files"), "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("ulimit -n")));
    assert_eq!(count("token IS NOT NULL"), 0);
    assert!(count("detect_state = 'pending'") > 0);
    run(&db, &Setup::default()).unwrap();
    assert_eq!(count("embed_state = 'done'"), 300);
    assert_sound(&db);
}
