//! What a model's input wants, put together from what its files say. Later sources override earlier ones, key
//! by key: the family's own habit or `preprocessor_config.json`, `croprow.toml`, the command line.

use super::card::{Card, InputCard};
use super::files::{CARD, ModelFiles, PREPROCESSOR};
use super::port::Numbers;
use super::preprocessor;
use super::session::Graph;
use crate::error::Error;
use crate::geometry::Size;
use crate::recipe::{CropFit, Filter, Fit, ImageInput};

/// Inputs of real models stay far below: detectors take some thousand pixels a side.
const SIDE_MOST_PX: u32 = 16_384;
const PIXELS_MOST: u32 = 1 << 26;

/// Grey level of padding where nobody says another: black.
const PAD_FILL_DEFAULT: u8 = 0;

/// An [`ImageInput`] that is not complete yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Draft {
    pub size: Option<Size>,
    pub filter: Option<Filter>,
    pub fit: Option<Fit>,
    pub mean: Option<[f32; 3]>,
    pub std: Option<[f32; 3]>,
}

/// What the input of `graph` wants: `habit` of the family, with what the files beside the graph say laid over it key
/// by key, the card last. A graph that takes grey levels gets them as they are, because it normalises itself. A
/// size that the graph fixes takes the place of sides that would follow the picture, with `fit_in_fixed`
/// ([`Fit::Corner`] where the graph is told which part is filled, else [`Fit::Squash`]).
///
/// # Errors
/// Something is missing or contradicts the graph; the message says what to write into which file.
pub(super) fn input_of(
    graph: &Graph,
    files: &ModelFiles,
    card: &Card,
    habit: Draft,
    fit_in_fixed: Fit,
) -> Result<ImageInput, Error> {
    let said = if card.input.is_complete() { None } else { preprocessor::read(files)? };
    let mut draft = said.unwrap_or_default().over(habit).overlaid(card)?;
    if graph.image.numbers == Numbers::U8 {
        draft.mean = card.input.mean.or(Some([0.0; 3]));
        draft.std = card.input.std.or(Some([1.0 / 255.0; 3]));
    }
    match (draft.fit, graph.image.fixed_size()) {
        (Some(Fit::Scale { .. }), Some(fixed)) => {
            draft.size = Some(fixed);
            draft.fit = Some(fit_in_fixed);
        }
        (Some(Fit::Scale { .. }), None) if graph.image.leaves_sides_open() => {}
        _ => draft.size = graph.settle_size(draft.size, draft_source(card))?,
    }
    let input = draft.finished().map_err(|missing| {
        graph.refuse(format!(
            "nothing says how it is fed ({} missing): put its preprocessor_config.json beside it, or croprow.toml with, \
             for example,\n[input]\nwidth = 224\nheight = 224\nresize = \"bicubic\"\ncrop_fit = \"squash\"\n\
             mean = [0.485, 0.456, 0.406]\nstd = [0.229, 0.224, 0.225]",
            missing.join(", ")
        ))
    })?;
    check_size(&input).map_err(|why| graph.refuse(why))?;
    Ok(input)
}

/// # Errors
/// The input is larger than any model's: allocating it would end the process.
pub(super) fn check_size(input: &ImageInput) -> Result<(), String> {
    let (values, sides) = (input.values_most() as u64, [input.size.width_px, input.size.height_px]);
    let most = sides.into_iter().max().unwrap_or(0);
    if most > SIDE_MOST_PX || values > 3 * u64::from(PIXELS_MOST) {
        return Err(format!(
            "its settings ask for an input of {}x{}; the most is {SIDE_MOST_PX} a side and {PIXELS_MOST} pixels",
            sides[0], sides[1]
        ));
    }
    Ok(())
}

fn draft_source(card: &Card) -> &'static str {
    if card.input.width.is_some() { CARD } else { PREPROCESSOR }
}

impl InputCard {
    /// True where nothing is left for another file to say.
    fn is_complete(&self) -> bool {
        let size = self.width.is_some() && self.height.is_some();
        size && self.resize.is_some() && self.crop_fit.is_some() && self.mean.is_some() && self.std.is_some()
    }
}

impl Draft {
    /// This draft, with what it leaves open from `base`.
    fn over(self, base: Self) -> Self {
        Self {
            size: self.size.or(base.size),
            filter: self.filter.or(base.filter),
            fit: self.fit.or(base.fit),
            mean: self.mean.or(base.mean),
            std: self.std.or(base.std),
        }
    }

    /// This draft with what the card says laid over it.
    ///
    /// # Errors
    /// Keys of the card that do not go together.
    pub(super) fn overlaid(mut self, card: &Card) -> Result<Self, Error> {
        let input = &card.input;
        if let (Some(width), Some(height)) = (input.width, input.height) {
            self.size = Some(Size::new(width, height));
        }
        let base = self.fit;
        self.fit = fit(input, base).map_err(|why| card.refuse(why))?;
        if matches!(base, Some(Fit::Scale { .. })) && self.fit != base && input.width.is_none() {
            // The size of sides that follow the picture is that of the longest, and no size for anything else.
            self.size = None;
        }
        self.filter = input.resize.or(self.filter);
        self.mean = input.mean.or(self.mean);
        self.std = input.std.or(self.std);
        Ok(self)
    }

    /// The finished input.
    ///
    /// # Errors
    /// The keys of `[input]` that are still missing.
    pub(super) fn finished(self) -> Result<ImageInput, Vec<&'static str>> {
        let Self { size, filter, fit, mean, std } = self;
        match (size, filter, mean, std) {
            (Some(size), Some(filter), Some(mean), Some(std)) => {
                Ok(ImageInput { size, filter, fit: fit.unwrap_or(Fit::Squash), mean, std })
            }
            _ => Err([
                (size.is_none(), "width, height"),
                (filter.is_none(), "resize"),
                (mean.is_none(), "mean"),
                (std.is_none(), "std"),
            ]
            .into_iter()
            .filter_map(|(missing, key)| missing.then_some(key))
            .collect()),
        }
    }
}

fn fit(input: &InputCard, base: Option<Fit>) -> Result<Option<Fit>, &'static str> {
    let base_shortest_px = match base {
        Some(Fit::Center { resize_shortest_px }) => Some(resize_shortest_px),
        _ => None,
    };
    let base_fill = match base {
        Some(Fit::Pad { fill }) => Some(fill),
        _ => None,
    };
    let chosen = match input.crop_fit {
        None => base,
        Some(CropFit::Squash) => Some(Fit::Squash),
        Some(CropFit::Pad) => Some(Fit::Pad { fill: base_fill.unwrap_or(PAD_FILL_DEFAULT) }),
        Some(CropFit::Center) => {
            let resize_shortest_px = input
                .resize_shortest
                .or(base_shortest_px)
                .ok_or("[input] crop_fit = \"center\" needs resize_shortest")?;
            Some(Fit::Center { resize_shortest_px })
        }
    };
    match (chosen, input.pad_fill, input.resize_shortest) {
        (Some(Fit::Pad { .. }), Some(fill), None) => Ok(Some(Fit::Pad { fill })),
        (Some(Fit::Center { .. }), None, Some(resize_shortest_px)) => Ok(Some(Fit::Center { resize_shortest_px })),
        (chosen, None, None) => Ok(chosen),
        (_, Some(_), _) => Err("[input] pad_fill needs crop_fit = \"pad\""),
        (_, None, Some(_)) => Err("[input] resize_shortest needs crop_fit = \"center\""),
    }
}

/// `input` with `--crop-fit` laid over it. `center` keeps the model's own short side, else the crop is the
/// whole short side.
pub(super) fn with_crop_fit(input: ImageInput, crop_fit: CropFit) -> ImageInput {
    let fit = match (crop_fit, input.fit) {
        (CropFit::Squash, _) => Fit::Squash,
        (CropFit::Pad, Fit::Pad { fill }) => Fit::Pad { fill },
        (CropFit::Pad, _) => Fit::Pad { fill: PAD_FILL_DEFAULT },
        (CropFit::Center, own @ Fit::Center { .. }) => own,
        (CropFit::Center, _) => Fit::Center { resize_shortest_px: input.size.width_px.max(input.size.height_px) },
    };
    ImageInput { fit, ..input }
}

/// True where the middle that is cut out is larger than the picture it is cut from.
pub(super) fn cuts_too_much(input: &ImageInput) -> bool {
    matches!(input.fit, Fit::Center { resize_shortest_px }
        if resize_shortest_px < input.size.width_px.max(input.size.height_px))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(input: InputCard) -> Card {
        Card { input, ..Card::default() }
    }

    fn base() -> Draft {
        Draft {
            size: Some(Size::new(224, 224)),
            filter: Some(Filter::Bicubic),
            fit: Some(Fit::Center { resize_shortest_px: 256 }),
            mean: Some([0.5; 3]),
            std: Some([0.5; 3]),
        }
    }

    #[test]
    fn a_card_overrides_key_by_key() {
        let input = InputCard { crop_fit: Some(CropFit::Squash), mean: Some([0.0; 3]), ..InputCard::default() };
        let done = base().overlaid(&card(input)).unwrap().finished().unwrap();
        assert_eq!((done.fit, done.mean, done.std), (Fit::Squash, [0.0; 3], [0.5; 3]));
        assert_eq!(base().overlaid(&card(InputCard::default())).unwrap(), base());
    }

    #[test]
    fn keys_that_do_not_go_together_are_refused() {
        let refused = |draft: Draft, input: InputCard| draft.overlaid(&card(input)).unwrap_err().to_string();
        let fill = InputCard { pad_fill: Some(114), ..InputCard::default() };
        assert!(refused(base(), fill).contains("pad_fill needs"));
        let center = InputCard { crop_fit: Some(CropFit::Center), ..InputCard::default() };
        assert!(refused(Draft::default(), center).contains("needs resize_shortest"));
        let short = InputCard { resize_shortest: Some(256), ..InputCard::default() };
        assert!(refused(Draft::default(), short).contains("needs crop_fit"));
    }

    #[test]
    fn a_fill_alone_changes_the_fill_of_a_padding_family() {
        let yolo = Draft { fit: Some(Fit::Pad { fill: 114 }), ..base() };
        let input = InputCard { pad_fill: Some(128), ..InputCard::default() };
        assert_eq!(yolo.overlaid(&card(input)).unwrap().fit, Some(Fit::Pad { fill: 128 }));
    }

    #[test]
    fn sides_that_follow_the_picture_leave_no_size_to_another_fit() {
        let scale = Fit::Scale { shortest_px: 800, longest_px: 1333, multiple_px: 1, step_px: 1 };
        let detr = Draft { size: Some(Size::new(1333, 1333)), fit: Some(scale), ..base() };
        assert_eq!(detr.clone().overlaid(&card(InputCard::default())).unwrap(), detr);
        let squash = InputCard { crop_fit: Some(CropFit::Squash), ..InputCard::default() };
        assert_eq!(detr.clone().overlaid(&card(squash.clone())).unwrap().size, None);
        let sized = InputCard { width: Some(640), height: Some(480), ..squash };
        assert_eq!(detr.overlaid(&card(sized)).unwrap().size, Some(Size::new(640, 480)));
    }

    #[test]
    fn a_card_is_complete_with_every_key_that_decides() {
        let card = InputCard {
            width: Some(1),
            height: Some(1),
            resize: Some(Filter::Nearest),
            crop_fit: Some(CropFit::Squash),
            mean: Some([0.0; 3]),
            std: Some([1.0; 3]),
            ..InputCard::default()
        };
        assert!(card.is_complete());
        assert!(!InputCard { crop_fit: None, ..card.clone() }.is_complete());
        assert!(!InputCard { std: None, ..card }.is_complete());
    }

    #[test]
    fn an_absurd_size_is_refused_before_anything_is_allocated() {
        let sized = |size, fit| ImageInput { size, fit, ..base().finished().unwrap() };
        let scale = Fit::Scale { shortest_px: 1_000_000_000, longest_px: 1_000_000_000, multiple_px: 1, step_px: 1 };
        for input in [
            sized(Size::new(100_000, 100_000), Fit::Squash),
            sized(Size::new(u32::MAX, u32::MAX), Fit::Squash),
            sized(Size::new(16_000, 16_000), Fit::Squash),
            sized(Size::new(1_000_000_000, 1_000_000_000), scale),
        ] {
            assert!(check_size(&input).unwrap_err().contains("the most is"), "{input:?}");
        }
        assert!(check_size(&base().finished().unwrap()).is_ok());
    }

    #[test]
    fn what_is_missing_is_named() {
        assert_eq!(Draft::default().finished().unwrap_err(), ["width, height", "resize", "mean", "std"]);
        assert_eq!(Draft { mean: None, ..base() }.finished().unwrap_err(), ["mean"]);
    }

    #[test]
    fn the_command_line_overrides_the_fit() {
        let done = base().finished().unwrap();
        assert_eq!(with_crop_fit(done.clone(), CropFit::Pad).fit, Fit::Pad { fill: 0 });
        assert_eq!(with_crop_fit(done.clone(), CropFit::Squash).fit, Fit::Squash);
        assert_eq!(with_crop_fit(done.clone(), CropFit::Center).fit, Fit::Center { resize_shortest_px: 256 });
        let squash = ImageInput { fit: Fit::Squash, ..done };
        assert_eq!(with_crop_fit(squash, CropFit::Center).fit, Fit::Center { resize_shortest_px: 224 });
    }
}
