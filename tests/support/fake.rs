//! Fake models behind the real traits. Deterministic from the pixels, independent of the batch.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use croprow::candidate::{Candidate, Naming, Vocabulary};
use croprow::config::{
    Batch, CudnnSearch, DecodeConfig, DetectConfig, EmbedConfig, GpuConfig, MAX_PIXELS_DEFAULT, Precision, RunConfig,
    Stale, Vram,
};
use croprow::db::Db;
use croprow::db::books::Deeds;
use croprow::db::recipes::StoredRecipe;
use croprow::db::rescue::LEASE;
use croprow::db::runs::NewRun;
use croprow::db::suspects::Claims;
use croprow::error::Error;
use croprow::geometry::{BoxPx, Size};
use croprow::model::device::EffectiveDevice;
use croprow::model::memory::{HostMemory, ImageBatch};
use croprow::model::{Asked, Detector, Embedder, Found, Loaded, ModelError, Models, Terminator};
use croprow::pipeline::apart::{self, Word};
use croprow::pipeline::cores::Cores;
use croprow::pipeline::learn::{BatchOwner, Learning};
use croprow::pipeline::measure::Instruments;
use croprow::pipeline::progress::Progress;
use croprow::pipeline::staged::run_staged;
use croprow::pipeline::stop::Stop;

use croprow::pipeline::{self, Job, Summary};
use croprow::recipe::{Decode, Filter, Fit, ImageInput, Keep, Labels, Nms, OnEmpty, Selection, Truncated};
use croprow::row::{NewRow, RowCode, RowError, Stage};
use ndarray::{ArrayView3, Axis};

/// How the fakes behave.
#[derive(Clone, Default)]
pub struct Behaviour {
    /// Time that each call of a session takes.
    pub call: Duration,
    /// Time that loading a model takes, where one is loaded after the other.
    pub load: Duration,
    /// Calls with more images fail as a whole.
    pub largest_batch: Option<usize>,
    /// Every call fails.
    pub broken: bool,
    /// Every call panics.
    pub panics: bool,
    /// Every call says that the device is gone.
    pub lost: bool,
    /// The same for the embedder only.
    pub embedder_is_lost: bool,
    /// Calls with more images say that memory is short, in the runtime's words; a session opened anew holds no more.
    pub memory_images: Option<usize>,
    /// How often sessions were opened anew.
    pub reopened: Arc<AtomicUsize>,
    /// Length of vectors; 8 where nothing is said.
    pub dim: Option<usize>,
    /// Vectors of pictures whose first value is below this are NaN.
    pub nan_below: f32,
}

/// What a run on a GPU is told where nothing else is said.
pub const GPU: GpuConfig =
    GpuConfig { vram: Vram::Share(0.8), cudnn_search: CudnnSearch::Heuristic, cudnn_max_workspace: false };

fn input(side_px: u32, fit: Fit) -> ImageInput {
    ImageInput { size: Size::new(side_px, side_px), filter: Filter::Bilinear, fit, mean: [0.0; 3], std: [1.0; 3] }
}

struct FakeDetector(ImageInput, Behaviour);
struct FakeEmbedder(ImageInput, Behaviour);

impl Behaviour {
    fn check(&self, batch: &dyn ImageBatch) -> Result<(), ModelError> {
        std::thread::sleep(self.call);
        assert!(!self.panics, "as planned");
        assert!(batch.images().len_of(Axis(0)) > 0, "a call with no image");
        if self.lost {
            return Err(ModelError::DeviceLost("CUDA error 719: unspecified launch failure".into()));
        }
        if self.memory_images.is_some_and(|n| batch.images().len_of(Axis(0)) > n) {
            return Err(ModelError::OutOfMemory(
                "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 1073741824"
                    .into(),
            ));
        }
        if self.broken || self.largest_batch.is_some_and(|n| batch.images().len_of(Axis(0)) > n) {
            return Err(ModelError::Failed("refused".into()));
        }
        Ok(())
    }
}

/// A whole number made of all pixels.
fn fingerprint(image: ArrayView3<'_, f32>) -> u64 {
    image.iter().fold(17_u64, |sum, v| sum.wrapping_mul(31).wrapping_add(u64::from((v * 255.0).round() as u32)))
}

impl Loaded for FakeDetector {
    fn input(&self) -> &ImageInput {
        &self.0
    }

    fn fixed_batch(&self) -> Option<usize> {
        None
    }

    fn take_one_by_one(&mut self) {}

    fn give_back_memory(&mut self) {}

    fn reopen(&mut self) -> Result<(), Error> {
        self.1.reopened.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn terminator(&self) -> Terminator {
        Terminator::default()
    }
}

impl Detector for FakeDetector {
    fn takes_prompts(&self) -> bool {
        false
    }

    fn detect(
        &mut self,
        batch: &dyn ImageBatch,
        _: &[Asked<'_>],
        floor: f32,
    ) -> Result<Vec<Result<Found, RowError>>, ModelError> {
        self.1.check(batch)?;
        let labels = vec!["cat".to_owned(), "dog".to_owned()];
        let vocabulary = Arc::new(Vocabulary { naming: Naming::Best, labels });
        let one = |image: ArrayView3<'_, f32>| {
            let seed = fingerprint(image);
            let boxes = (0..seed % 4).map(|i| {
                let bbox = BoxPx::from_center(6.0 + 7.0 * i as f32, 16.0, 5.0 + 2.0 * (seed % 3) as f32, 8.0);
                Candidate::single(bbox, ((seed >> i) % 2) as usize, 0.4 + 0.1 * i as f32)
            });
            let candidates = boxes.filter(|c| c.best() > floor).collect();
            Ok(Found { candidates, vocabulary: Arc::clone(&vocabulary) })
        };
        Ok(batch.images().axis_iter(Axis(0)).map(one).collect())
    }
}

impl Loaded for FakeEmbedder {
    fn input(&self) -> &ImageInput {
        &self.0
    }

    fn fixed_batch(&self) -> Option<usize> {
        None
    }

    fn take_one_by_one(&mut self) {}

    fn give_back_memory(&mut self) {}

    fn reopen(&mut self) -> Result<(), Error> {
        self.1.reopened.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn terminator(&self) -> Terminator {
        Terminator::default()
    }
}

impl Embedder for FakeEmbedder {
    fn dim(&self) -> usize {
        self.1.dim.unwrap_or(8)
    }

    fn embed(&mut self, batch: &dyn ImageBatch) -> Result<Vec<Result<Vec<f32>, RowError>>, ModelError> {
        let lost = self.1.lost || self.1.embedder_is_lost;
        Behaviour { lost, ..self.1.clone() }.check(batch)?;
        let one = |image: ArrayView3<'_, f32>| {
            if image[[0, 0, 0]] < self.1.nan_below {
                return Err(RowError::new(RowCode::NanOutput, "the vector holds NaN"));
            }
            let seed = fingerprint(image);
            Ok((0..self.dim()).map(|i| ((seed >> (8 * (i % 8))) % 251) as f32 / 251.0).collect())
        };
        Ok(batch.images().axis_iter(Axis(0)).map(one).collect())
    }
}

/// A detector's settings with this selection.
pub fn detect_config(selection: Selection) -> DetectConfig {
    DetectConfig {
        model: "model".into(),
        precision: Precision::Auto,
        prompt: None,
        labels: Labels::Spans,
        candidate_floor: 0.05,
        shape_step_px: None,
        selection,
    }
}

/// Everything above `box_threshold`, as `run` selects it where nothing else is said.
pub fn selection(box_threshold: f32) -> Selection {
    Selection {
        box_threshold,
        text_threshold: 0.25,
        nms_iou: 0.45,
        nms: Nms::Label,
        min_box_px: 1.0,
        margin: 0.0,
        keep: Keep::All,
        on_empty: OnEmpty::Skip,
    }
}

/// What to run.
#[derive(Clone)]
pub struct Setup {
    pub detector: Option<&'static str>,
    pub embedder: Option<&'static str>,
    pub stale: Stale,
    /// `--where`.
    pub condition: Option<&'static str>,
    pub behaviour: Behaviour,
    pub selection: Selection,
    pub config: RunConfig,
    /// Cores of the machine that is played.
    pub cores: usize,
    /// Sessions of the embedder.
    pub sessions: usize,
    /// Which rows it claims.
    pub claims: Claims,
    /// After which silence another worker loses its rows.
    pub lease: Duration,
    /// Sessions compute elsewhere, as on a GPU.
    pub on_gpu: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            detector: Some("fake-detector-1"),
            embedder: Some("fake-embedder-1"),
            stale: Stale::Keep,
            condition: None,
            behaviour: Behaviour::default(),
            selection: selection(0.3),
            config: RunConfig {
                detect: None,
                embed: None,
                root: None,
                decode: DecodeConfig {
                    max_pixels: MAX_PIXELS_DEFAULT,
                    truncated: Truncated::Fail,
                    mode: Decode::Scaled,
                },
                crops: None,
                decode_limit: Duration::from_secs(300),
                limit: None,
                max_failures: None,
                threads: 2,
                batch: Batch::Fixed(4),
                memory_bytes: 64 << 20,
                gpu: GPU,
                staged: false,
                metrics: None,
            },
            cores: 2,
            sessions: 2,
            claims: Claims::Ordinary,
            lease: LEASE,
            on_gpu: false,
        }
    }
}

/// Runs the real pipeline with fake models on a database.
pub fn run(db: &Path, setup: &Setup) -> Result<Summary, Error> {
    run_until(db, setup, &Stop::default())
}

/// The same with a stop that somebody else holds.
pub fn run_until(db: &Path, setup: &Setup, stop: &Stop) -> Result<Summary, Error> {
    let mut db = Db::open(db)?;
    db.rescue_dead_runs()?;
    db.claim_only(setup.claims);
    db.restrict(setup.condition)?;
    db.set_lease(setup.lease);
    let recipe = |name: &'static str| StoredRecipe { body: name, model_digest: name, model_path: Path::new(name) };
    let (detect, embed) = (setup.detector.map(recipe), setup.embedder.map(recipe));
    let new = NewRun { device: "cpu", device_note: None, runtime: "fake", settings: "{}", detect, embed };
    let (run, in_force) = db.begin_run(&new)?;
    let mut config = setup.config.clone();
    config.detect =
        setup.detector.map(|name| DetectConfig { model: name.into(), ..detect_config(setup.selection.clone()) });
    config.embed = setup.embedder.map(|name| EmbedConfig {
        model: name.into(),
        precision: Precision::Auto,
        crop_fit: None,
        normalize: None,
    });
    let wanted: Vec<Stage> =
        [setup.detector.map(|_| Stage::Detect), setup.embedder.map(|_| Stage::Embed)].into_iter().flatten().collect();
    let load = |stages: &[Stage]| Models {
        detector: setup.detector.filter(|_| stages.contains(&Stage::Detect)).map(|_| -> Box<dyn Detector> {
            Box::new(FakeDetector(input(32, Fit::Pad { fill: 114 }), setup.behaviour.clone()))
        }),
        embedder: setup
            .embedder
            .filter(|_| stages.contains(&Stage::Embed))
            .map(|_| -> Box<dyn Embedder> { Box::new(FakeEmbedder(input(16, Fit::Squash), setup.behaviour.clone())) }),
        more_detectors: Vec::new(),
        more_embedders: (1..setup.sessions)
            .filter(|_| setup.embedder.is_some() && stages.contains(&Stage::Embed))
            .map(|_| -> Box<dyn Embedder> { Box::new(FakeEmbedder(input(16, Fit::Squash), setup.behaviour.clone())) })
            .collect(),
        threads_per_session: 1,
        device: EffectiveDevice::cpu(None),
        memory: HostMemory::default(),
        notes: Vec::new(),
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(config.threads).build().unwrap();
    let cores = Cores::new(config.threads, true, setup.cores);
    let learning = learning(&db, &wanted);
    let books = db.open_books()?;
    let (db, progress, instruments) = (Mutex::new(db), Progress::default(), Instruments::default());
    let job = Job {
        config: &config,
        db: &db,
        run,
        in_force,
        stale: setup.stale,
        stages: &wanted,
        pool: &pool,
        cores: &cores,
        on_host: !setup.on_gpu,
        learnt: &learning,
        instruments: &instruments,
        progress: &progress,
        stop,
        watcher: (setup.claims != Claims::Ordinary).then_some(&Word::say),
        one_by_one: setup.claims == Claims::Alone,
        leave: &|result| panic!("the run left its process: {result:?}"),
    };
    let result = if config.staged {
        let mut slowly = |stage| {
            std::thread::sleep(setup.behaviour.load);
            Ok(load(&[stage]))
        };
        run_staged(&job, &mut slowly, &|| {}, &|_| {})
    } else {
        pipeline::run(&job, load(&wanted))
    };
    let mut db = db.into_inner().unwrap();
    let how = if result.is_ok() { "complete" } else { "error" };
    if let (Ok(_), Claims::Ordinary) = (&result, setup.claims) {
        let (claimed, ended) = (Progress::get(&progress.claimed), Progress::get(&progress.ended));
        let Summary { done, failed, released, .. } = progress.summary();
        let deeds = Deeds { run, in_force, stale: setup.stale, claimed, ended, released, done, failed };
        assert_eq!(db.audit(&books, &deeds)?, Vec::<String>::new(), "the books of every run balance");
    }
    let ended = db.end_run(run, how, 0, Progress::get(&progress.done), Progress::get(&progress.failed), None);
    // An error of the run is the one to tell.
    let summary = result?;
    ended?;
    Ok(summary)
}

/// As `croprow run` does: suspects first, in processes that `start` starts, until there are none.
pub fn run_and_clear(
    db: &Path,
    setup: &Setup,
    start: &mut dyn FnMut(Claims) -> std::io::Result<std::process::Child>,
) -> Result<(), Error> {
    loop {
        let mut suspects = Db::open(db)?;
        suspects.rescue_dead_runs()?;
        if let Some(code) = apart::clear(&mut suspects, start, &|| false, &|_| {}, &mut apart::Ended::default())? {
            return Err(Error::System(format!("a child ended with {code}")));
        }
        drop(suspects);
        run(db, setup)?;
        if Db::open(db)?.suspects()?.is_empty() {
            return Ok(());
        }
    }
}

/// A database with these files as its rows; one that is there gets those it lacks.
pub fn database(db: &Path, files: &[std::path::PathBuf]) {
    let mut db = Db::open_or_create(db).unwrap();
    let (result, _) = db.add(|sink| {
        for path in files {
            sink(NewRow { path: path.clone(), key: None, prompt: None, tag: None, stamp: None })?;
        }
        Ok(())
    });
    result.unwrap();
}

/// What the database knows of the fakes' batch sizes.
fn learning(db: &Db, stages: &[Stage]) -> Learning {
    let owners: Vec<BatchOwner> = stages
        .iter()
        .map(|stage| BatchOwner {
            stage: *stage,
            digest: format!("fake-{}", stage.word()),
            path: "fake".into(),
            device: "cpu".into(),
        })
        .collect();
    Learning::read(db, owners).unwrap()
}
