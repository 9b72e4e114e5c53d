//! `croprow doctor`: runtime library, device and models as a run would take them: what is there, what is missing, how
//! to mend it. Touches no database.

use std::path::{Path, PathBuf};

use clap::Args;
use croprow::config::{DetectConfig, Device, EmbedConfig, Precision};
use croprow::error::Error;
use croprow::model::detector;
use croprow::model::device::{self, EffectiveDevice};
use croprow::model::embedder::VectorModel;
use croprow::model::facts::{self, Facts};
use croprow::model::files::{ModelFiles, NoCache, digest, locate};
use croprow::model::library::{self, Runtime};
use croprow::model::self_test::{self, Verdict};
use croprow::model::vram::Gpu;
use croprow::printable;
use croprow::recipe::Labels;
use serde_json::{Map, Value};

use super::run_args::PrecisionFlag;
use super::settings::Settings;
use super::{memory, parse, print, print_json};

/// Runtime library, device and models: what is there, what is missing, how to mend it.
#[derive(Args)]
#[command(after_help = "Examples:
  croprow doctor
  croprow doctor --detector yolo11n.onnx --embedder dinov2-small/
  croprow doctor --embedder models--org--name --precision fp16 --json

Exit codes: 0 a run can start with this, 1 it cannot.")]
pub(crate) struct DoctorArgs {
    /// Detector: folder or .onnx file
    #[arg(long, value_name = "MODEL")]
    detector: Option<PathBuf>,
    /// Embedder: folder or .onnx file
    #[arg(long, value_name = "MODEL")]
    embedder: Option<PathBuf>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto", value_parser = parse::device)]
    device: Device,
    /// The ONNX Runtime library [default: ORT_DYLIB_PATH, else beside the program, else the demo's]
    #[arg(long, value_name = "FILE")]
    runtime: Option<PathBuf>,
    /// Which graph of a folder with several [default: auto, fp16 on CUDA and fp32 on the CPU]
    #[arg(long)]
    precision: Option<PrecisionFlag>,
    /// One JSON object, for programs
    #[arg(long)]
    json: bool,
}

/// One part of the report.
struct Part {
    name: &'static str,
    facts: Facts,
    error: Option<Error>,
}

/// Where models are tried.
struct Place {
    runtime: Runtime,
    device: EffectiveDevice,
}

pub(crate) fn run(args: &DoctorArgs) -> Result<u8, Error> {
    let (mut parts, place) = place(args);
    parts.extend(args.detector.as_deref().map(|model| part("detector", |f| detector(model, args, place.as_ref(), f))));
    parts.extend(args.embedder.as_deref().map(|model| part("embedder", |f| embedder(model, args, place.as_ref(), f))));
    let usable = parts.iter().all(|part| part.error.is_none());
    if args.json { print_json(&json(&parts, usable)) } else { print(&text(&parts, usable)) }?;
    Ok(if usable { 0 } else { 1 })
}

/// Facts that are found before something fails are told all the same.
fn part(name: &'static str, find: impl FnOnce(&mut Facts) -> Result<(), Error>) -> Part {
    let mut facts = Facts::new();
    let error = find(&mut facts).err();
    Part { name, facts, error }
}

fn place(args: &DoctorArgs) -> (Vec<Part>, Option<Place>) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut runtime = None;
    let library = part("runtime", |facts| {
        let loaded = library::load(args.runtime.as_deref(), args.device, threads)?;
        facts.push(("library", printable::path(&loaded.path)));
        facts.push(("version", loaded.version.clone()));
        runtime = Some(loaded);
        Ok(())
    });
    let Some(runtime) = runtime else { return (vec![library], None) };
    let mut effective = None;
    let device = part("device", |facts| {
        let device = device::choose(&runtime, args.device, &Settings::default().gpu)?;
        facts.push(("device", device.word.clone()));
        facts.extend(device.note.clone().map(|why| ("why", why)));
        facts.push(("threads", threads.to_string()));
        facts.extend(memory::free_bytes().map(|free| ("free memory", format!("{} MiB", free >> 20))));
        if let Some(gpu) = device.cuda_number().and_then(Gpu::find) {
            facts.extend(gpu.name().map(|name| ("GPU", name)));
            facts.extend(gpu.total_bytes().map(|total| ("GPU memory", format!("{} MiB", total >> 20))));
        }
        effective = Some(device);
        Ok(())
    });
    (vec![library, device], effective.map(|device| Place { runtime, device }))
}

/// The files of a model as a run on that device takes them. Without a device they are those for the CPU.
fn files(model: &Path, args: &DoctorArgs, place: Option<&Place>, facts: &mut Facts) -> Result<ModelFiles, Error> {
    let half = place.is_some_and(|p| p.device.is_cuda());
    let files = locate(model, precision(args), half)?;
    facts.extend(facts::of_files(&files)?);
    facts.push(("digest", digest(&files, &mut NoCache)?));
    Ok(files)
}

fn detector(model: &Path, args: &DoctorArgs, place: Option<&Place>, facts: &mut Facts) -> Result<(), Error> {
    let files = files(model, args, place, facts)?;
    let Some(place) = place else { return Ok(()) };
    let settings = Settings::default();
    let config = DetectConfig {
        model: model.to_path_buf(),
        precision: precision(args),
        prompt: None,
        labels: Labels::Spans,
        candidate_floor: settings.candidate_floor,
        shape_step_px: settings.shape_step_px,
        selection: settings.selection(),
    };
    let (mut detector, note) = detector::load(&files, &config, &place.runtime, &place.device)?;
    facts.extend(facts::of_detector(detector.as_ref()));
    facts.extend(note.map(|note| ("warning", note)));
    tell(&self_test::detector(detector.as_mut(), &files)?, facts);
    Ok(())
}

fn embedder(model: &Path, args: &DoctorArgs, place: Option<&Place>, facts: &mut Facts) -> Result<(), Error> {
    let files = files(model, args, place, facts)?;
    let Some(place) = place else { return Ok(()) };
    let config =
        EmbedConfig { model: model.to_path_buf(), precision: precision(args), crop_fit: None, normalize: None };
    let (mut embedder, note) = VectorModel::load(&files, &config, &place.runtime, &place.device)?;
    facts.extend(facts::of_embedder(&embedder));
    facts.extend(note.map(|note| ("warning", note)));
    tell(&self_test::embedder(&mut embedder, &files)?, facts);
    Ok(())
}

fn tell(verdict: &Verdict, facts: &mut Facts) {
    let against = match verdict.compared {
        0 => "no reference.json to compare with".to_owned(),
        1 => "equals the original in 1 case of reference.json".to_owned(),
        cases => format!("equals the original in {cases} cases of reference.json"),
    };
    let batches = if verdict.one_by_one { "; takes one image at a time" } else { "" };
    facts.push(("self-test", format!("passed, {against}{batches}")));
    facts.extend(verdict.warning.clone().map(|warning| ("warning", warning)));
}

fn precision(args: &DoctorArgs) -> Precision {
    args.precision.map_or(Precision::Auto, Into::into)
}

fn text(parts: &[Part], usable: bool) -> String {
    let mut text = String::new();
    for part in parts {
        text.push_str(&format!("{}\n", part.name));
        let error = part.error.as_ref().map(|e| ("error", e.to_string()));
        let facts = part.facts.iter().map(|(key, value)| (*key, value.clone()));
        for (key, value) in facts.chain(error) {
            // Lines after the first stand below it.
            let value = printable::lines(&value).replace('\n', &format!("\n{:20}", ""));
            text.push_str(&format!("  {key:<18}{value}\n"));
        }
    }
    text.push_str(if usable { "a run can start with this\n" } else { "a run cannot start with this: see error\n" });
    text
}

fn json(parts: &[Part], usable: bool) -> Value {
    let mut all = Map::new();
    for part in parts {
        let mut one = Map::new();
        for (key, value) in &part.facts {
            let key = key.replace([' ', '-'], "_");
            // Warnings are the only key that can be there twice.
            let value = match one.get(&key).and_then(Value::as_str) {
                Some(before) => format!("{before}\n{value}"),
                None => value.clone(),
            };
            one.insert(key, value.into());
        }
        one.extend(part.error.as_ref().map(|e| ("error".to_owned(), e.to_string().into())));
        all.insert(part.name.to_owned(), one.into());
    }
    all.insert("usable".to_owned(), usable.into());
    all.into()
}
