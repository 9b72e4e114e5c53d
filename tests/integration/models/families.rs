//! Embedders of every family against `transformers`, step by step: our pixels of the golden pictures, vectors for
//! the reference's own pixels, and vectors from the files alone. The models are tiny and their weights random: what
//! is held here is structure and feeding. Everything is made by `scripts/reference/tiny_families.py`.

use std::fs;
use std::path::{Path, PathBuf};

use croprow::config::{DecodeConfig, Device, EmbedConfig, MAX_PIXELS_DEFAULT, Precision};
use croprow::geometry::{BoxPx, Scale, Size};
use croprow::model::device::EffectiveDevice;
use croprow::model::embedder::VectorModel;
use croprow::model::files::locate;
use croprow::model::library;
use croprow::model::{Embedder, Loaded};
use croprow::pixels::{decode, header, tensor};
use croprow::recipe::{ImageInput, Truncated};
use ndarray::{Array4, Axis, concatenate};
use serde::Deserialize;

/// Torchvision, with which the reference resizes, and Pillow differ by one grey level.
const LEVELS_MOST: f32 = 1.01;

/// The same pixels give the same vector up to the order of additions.
const SAME_PIXELS_COSINE_LEAST: f64 = 0.999_99;

/// One grey level in some pixels moves the vectors by up to 6e-6; blue for red and a resize without antialias move
/// them by 5e-4 at least (`reaction` in the references).
const END_TO_END_COSINE_LEAST: f64 = 0.9999;

const FAMILIES: [&str; 10] = [
    "clip",
    "clip_vision",
    "convnext",
    "dinov2",
    "dinov2_with_registers",
    "dinov3_vit",
    "resnet",
    "siglip_vision",
    "swin",
    "vit",
];

#[derive(Deserialize)]
struct Reference {
    model: String,
    pictures: Vec<Picture>,
}

#[derive(Deserialize)]
struct Picture {
    file: String,
    upright: [u32; 2],
    tensor: [u32; 2],
    pixels: String,
    vector: Vec<f32>,
}

impl Picture {
    fn size(&self) -> Size {
        Size::new(self.tensor[0], self.tensor[1])
    }

    /// What the reference's processor made of the picture: grey levels, or where it resizes numbers, the input itself.
    fn theirs(&self, input: &ImageInput) -> Array4<f32> {
        let path = root().join("tests/data/reference/families").join(&self.pixels);
        if path.extension().unwrap() == "f32" {
            let bytes = fs::read(path).unwrap();
            let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            return batch_of(values.collect(), self.size());
        }
        let image = image::open(path).unwrap().to_rgb8();
        let number = |c: usize, level: u8| (f32::from(level) / 255.0 - input.mean[c]) / input.std[c];
        let (width, height) = (image.width() as usize, image.height() as usize);
        Array4::from_shape_fn((1, 3, height, width), |(_, c, y, x)| number(c, image.get_pixel(x as u32, y as u32).0[c]))
    }

    /// Ours, from the file.
    fn ours(&self, input: &ImageInput) -> Array4<f32> {
        let config = DecodeConfig {
            max_pixels: MAX_PIXELS_DEFAULT,
            truncated: Truncated::Fail,
            mode: croprow::recipe::Decode::Exact,
        };
        let upright =
            decode::decode(&header::probe(&root().join(&self.file), &config).unwrap(), &config, Scale::FULL).unwrap();
        assert_eq!(upright.facts.upright, Size::new(self.upright[0], self.upright[1]), "{}", self.file);
        assert_eq!(input.tensor_size(upright.facts.upright), self.size(), "{}", self.file);
        let mut values = vec![f32::NAN; input.values(upright.facts.upright)];
        tensor::fill(&upright.picture, BoxPx::whole(upright.facts.upright), input, &mut values).unwrap();
        batch_of(values, self.size())
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn reference(family: &str) -> Reference {
    let path = root().join("tests/data/reference/families").join(format!("{family}.json"));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn folder(reference: &Reference) -> PathBuf {
    root().join("tests/data/models").join(&reference.model)
}

fn load(model: &Path) -> VectorModel {
    let config = EmbedConfig {
        model: model.to_path_buf(),
        precision: Precision::Auto,
        crop_fit: None,
        // The reference's vectors are as the model gives them.
        normalize: Some(false),
    };
    let runtime = library::load(None, Device::Cpu, 2).unwrap_or_else(|e| panic!("run scripts/test.sh ({e})"));
    let files = locate(model, Precision::Auto, false).unwrap();
    VectorModel::load(&files, &config, &runtime, &EffectiveDevice::cpu(None)).unwrap().0
}

fn batch_of(values: Vec<f32>, size: Size) -> Array4<f32> {
    Array4::from_shape_vec((1, 3, size.height_px as usize, size.width_px as usize), values).unwrap()
}

fn vector(model: &mut VectorModel, batch: &Array4<f32>) -> Vec<f32> {
    model.embed(batch).unwrap().remove(0).unwrap()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn pixels_of_every_family_are_those_of_its_processor() {
    for family in FAMILIES {
        let reference = reference(family);
        let input = load(&folder(&reference)).input().clone();
        for picture in &reference.pictures {
            let (ours, theirs) = (picture.ours(&input), picture.theirs(&input));
            assert_eq!(ours.dim(), theirs.dim());
            let levels =
                ours.indexed_iter().map(|((i, c, y, x), v)| (v - theirs[[i, c, y, x]]).abs() * input.std[c] * 255.0);
            let worst = levels.fold(0.0, f32::max);
            assert!(worst <= LEVELS_MOST, "{family}, {}: {worst} grey levels", picture.file);
        }
    }
}

#[test]
fn the_same_pixels_give_the_vectors_of_the_reference_alone_and_in_a_batch() {
    for family in FAMILIES {
        let reference = reference(family);
        let mut model = load(&folder(&reference));
        assert_eq!((model.dim(), model.fixed_batch()), (reference.pictures[0].vector.len(), None), "{family}");
        let input = model.input().clone();
        let tensors: Vec<Array4<f32>> = reference.pictures.iter().map(|p| p.theirs(&input)).collect();
        let views: Vec<_> = tensors.iter().map(|t| t.view()).collect();
        let together = model.embed(&concatenate(Axis(0), &views).unwrap()).unwrap();
        for ((picture, tensor), in_batch) in reference.pictures.iter().zip(&tensors).zip(together) {
            for ours in [vector(&mut model, tensor), in_batch.unwrap()] {
                let found = cosine(&ours, &picture.vector);
                assert!(found >= SAME_PIXELS_COSINE_LEAST, "{family}, {}: cosine {found}", picture.file);
            }
        }
    }
}

#[test]
fn a_file_gives_the_vector_of_the_reference() {
    for family in FAMILIES {
        let reference = reference(family);
        let mut model = load(&folder(&reference));
        let input = model.input().clone();
        for picture in &reference.pictures {
            let found = cosine(&vector(&mut model, &picture.ours(&input)), &picture.vector);
            assert!(found >= END_TO_END_COSINE_LEAST, "{family}, {}: cosine {found}", picture.file);
        }
    }
}

/// The folder of a family with a card beside the graph.
fn with_card(family: &str, card: &str) -> (tempfile::TempDir, VectorModel) {
    let (from, to) = (folder(&reference(family)), tempfile::tempdir().unwrap());
    for file in ["model.onnx", "config.json", "preprocessor_config.json"] {
        fs::copy(from.join(file), to.path().join(file)).unwrap();
    }
    fs::write(to.path().join("croprow.toml"), card).unwrap();
    let model = load(to.path());
    (to, model)
}

#[test]
fn a_mean_is_over_the_pictures_parts_and_not_over_class_and_registers() {
    let reference = reference("dinov3_vit");
    let (_one, mut parts) = with_card("dinov3_vit", "[embedder]\npooling = \"mean\"\n");
    let (_two, mut all) = with_card("dinov3_vit", "[embedder]\npooling = \"mean\"\nprefix_tokens = 0\n");
    let (_three, mut without_class) = with_card("dinov3_vit", "[embedder]\npooling = \"mean\"\nprefix_tokens = 1\n");
    let input = parts.input().clone();
    for picture in &reference.pictures {
        let tensor = picture.theirs(&input);
        let (parts, all) = (vector(&mut parts, &tensor), vector(&mut all, &tensor));
        let without_class = vector(&mut without_class, &tensor);
        // 16 parts, 4 registers, 1 class token.
        for i in 0..parts.len() {
            let class = all[i] * 21.0 - without_class[i] * 20.0;
            assert!((class - picture.vector[i]).abs() < 1e-3, "{class} {}", picture.vector[i]);
        }
        assert!(cosine(&parts, &without_class) < 0.9999);
    }
}
