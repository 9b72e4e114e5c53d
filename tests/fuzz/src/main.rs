//! Fuzzing: one program for all targets, chosen by `CROPROW_FUZZ_TARGET`. libFuzzer makes inputs and watches which
//! branches they reach; a target panics where something is wrong. `scripts/fuzz.sh` builds and runs it.

#![no_main]

mod input;
mod model;
mod pixels;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

type Target = fn(&[u8]);

const TARGETS: [(&str, Target); 9] = [
    ("header", pixels::header),
    ("jpeg", pixels::jpeg),
    ("formats", pixels::formats),
    ("candidates", model::candidates),
    ("outputs", model::outputs),
    ("prompts", model::prompts),
    ("graphs", model::graphs),
    ("importers", input::importers),
    ("conditions", input::conditions),
];

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    // The decoders' own panics are caught and become a row's code; libFuzzer's hook would end the process. What is
    // caught by nobody still does.
    std::panic::set_hook(Box::new(|info| {
        if std::env::var_os("CROPROW_FUZZ_PANICS").is_some() {
            eprintln!("{info}");
        }
    }));
    let name = std::env::var("CROPROW_FUZZ_TARGET").unwrap_or_default();
    let known = TARGETS.iter().find(|(known, _)| *known == name);
    known.unwrap_or_else(|| panic!("CROPROW_FUZZ_TARGET is one of {:?}", TARGETS.map(|(name, _)| name))).1
});

fuzz_target!(|data: &[u8]| TARGET(data));
