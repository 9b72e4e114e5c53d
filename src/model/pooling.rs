//! From a graph's outputs to one vector per image: which output, and how tokens or maps become numbers.
//!
//! Source of the families' rules: `transformers` 5.24, `modeling_*.py`. The `pooler_output` of ViT, DeiT and BEiT
//! is a layer of its own, which many checkpoints come without and exports then fill with random weights; their
//! first token (CLS) is what was trained. Of DINOv2 and DINOv3 `pooler_output` is that token itself.

use ndarray::{ArrayViewD, Axis};

use super::card::{EmbedderCard, Pooling};
use super::hub::HubConfig;
use super::port::{Port, describe};

/// Names that exporters give to a vector, the most specific first.
const VECTOR_NAMES: [&str; 7] =
    [PROJECTED, POOLED, "embedding", "embeddings", "image_embedding", "sentence_embedding", "features"];

/// What a model of pictures and text compares with the text.
const PROJECTED: &str = "image_embeds";

/// What a model makes of its tokens or its map itself.
const POOLED: &str = "pooler_output";

/// The tokens of a transformer, or the map of a convolutional network.
const TOKENS: &str = "last_hidden_state";

/// How an output becomes a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    /// Place among the outputs.
    pub output: usize,
    pub pooling: Pooling,
    /// Tokens before those of the picture's parts, which `mean` leaves out.
    pub prefix_tokens: usize,
}

/// What is usual for a family: outputs by name, the preferred first.
struct Habit {
    order: &'static [(&'static str, Pooling)],
    prefix_tokens: usize,
}

/// By `model_type` of `config.json`.
fn habit_of(config: &HubConfig) -> Option<Habit> {
    use Pooling::{Cls, Mean, Pooled, Projected};
    let registers = config.register_tokens.unwrap_or(0);
    let (order, prefix_tokens): (&'static [_], usize) = match config.model_type.as_deref()? {
        "clip" | "clip_vision_model" | "chinese_clip" | "chinese_clip_vision_model" | "metaclip_2" | "altclip" => {
            (&[(PROJECTED, Projected), (POOLED, Pooled), (TOKENS, Cls)], 1)
        }
        // They have no CLS token: `pooler_output` attends over all tokens.
        "siglip" | "siglip_vision_model" | "siglip2" | "siglip2_vision_model" => {
            (&[(PROJECTED, Projected), (POOLED, Pooled), (TOKENS, Mean)], 0)
        }
        "dinov2" | "dinov2_with_registers" | "dinov3_vit" => (&[(TOKENS, Cls), (POOLED, Pooled)], 1 + registers),
        "vit" | "beit" | "data2vec-vision" | "vit_mae" | "vit_msn" => (&[(TOKENS, Cls), (POOLED, Pooled)], 1),
        // CLS and a token of distillation.
        "deit" => (&[(TOKENS, Cls), (POOLED, Pooled)], 2),
        "ijepa" => (&[(TOKENS, Mean)], 0),
        "convnext" | "convnextv2" | "resnet" | "regnet" | "bit" | "efficientnet" | "mobilenet_v1" | "mobilenet_v2"
        | "swin" | "swinv2" | "focalnet" | "hiera" => (&[(POOLED, Pooled), (TOKENS, Mean)], 0),
        _ => return None,
    };
    Some(Habit { order, prefix_tokens })
}

/// The output that holds the vector, and how it is read: what the card says, else what the family does, else by
/// name and rank. The outputs have the dimensions of a call.
///
/// # Errors
/// None fits, or it is not clear which; the text says what was looked for, without the list of outputs.
pub(super) fn choose(outputs: &[Port], card: &EmbedderCard, config: &HubConfig) -> Result<Reading, String> {
    let habit = habit_of(config);
    let prefix_tokens = card.prefix_tokens.or(habit.as_ref().map(|h| h.prefix_tokens)).unwrap_or(0);
    let reading = |(output, pooling): (usize, Pooling)| Reading { output, pooling, prefix_tokens };
    if let Some(name) = &card.output {
        let output =
            outputs.iter().position(|o| &o.name == name).ok_or_else(|| format!("no output is called {name}"))?;
        return pooling_of(&outputs[output], card.pooling).map(|pooling| reading((output, pooling)));
    }
    let at = |name: &str, pooling: Pooling| {
        let output = outputs.iter().position(|o| o.name == name)?;
        pooling_of(&outputs[output], Some(pooling)).ok().map(|pooling| (output, pooling))
    };
    let wanted = |pooling: &Pooling| card.pooling.is_none_or(|w| w == *pooling);
    let order = habit.iter().flat_map(|h| h.order).filter(|(_, pooling)| wanted(pooling));
    let usual = order.into_iter().find_map(|(name, pooling)| at(name, *pooling));
    let named = || match card.pooling? {
        Pooling::Projected => at(PROJECTED, Pooling::Projected),
        Pooling::Pooled => at(POOLED, Pooling::Pooled),
        _ => None,
    };
    let found = usual.or_else(named).or_else(|| by_rank(outputs, card.pooling));
    found.map(reading).ok_or_else(|| match card.pooling {
        Some(pooling) => format!("no output that is clearly meant by pooling = \"{}\"", pooling.word()),
        None => "no output that is clearly the vector".to_owned(),
    })
}

/// A vector by its name, or the only output of its kind: vectors before tokens, tokens before maps.
fn by_rank(outputs: &[Port], wanted: Option<Pooling>) -> Option<(usize, Pooling)> {
    if wanted == Some(Pooling::Projected) {
        return None;
    }
    let usable: Vec<(usize, Pooling)> = outputs
        .iter()
        .enumerate()
        .filter_map(|(i, o)| pooling_of(o, wanted).ok().map(|pooling| (i, pooling)))
        .collect();
    let named = |name: &str| usable.iter().copied().find(|(i, _)| outputs[*i].name == name);
    let ranked = |rank: usize| {
        let mut those = usable.iter().copied().filter(|(i, _)| outputs[*i].dims.len() == rank);
        those.next().filter(|_| those.next().is_none())
    };
    let vector = VECTOR_NAMES.iter().find_map(|name| named(name).filter(|(i, _)| is_vector(&outputs[*i])));
    let has_rank = |rank: usize| usable.iter().any(|(i, _)| outputs[*i].dims.len() == rank);
    vector.or_else(|| if has_rank(2) { ranked(2) } else { named(TOKENS).or_else(|| ranked(3)).or_else(|| ranked(4)) })
}

/// `[b, d]`, also as a map of one point.
fn is_vector(output: &Port) -> bool {
    matches!(output.dims[..], [_, _] | [_, _, 1, 1])
}

/// How the output is pooled. The batch is its first dimension.
fn pooling_of(output: &Port, wanted: Option<Pooling>) -> Result<Pooling, String> {
    let rank = output.dims.len();
    if !output.is_float() {
        return Err(format!("output {} holds no f32 or f16", describe(std::slice::from_ref(output))));
    }
    let pooling = match (wanted, rank) {
        (Some(pooling), _) => pooling,
        (None, _) if is_vector(output) => Pooling::Vector,
        (None, 3) => Pooling::Cls,
        (None, _) => Pooling::Mean,
    };
    let fits = match pooling {
        Pooling::Vector | Pooling::Pooled | Pooling::Projected => is_vector(output),
        Pooling::Cls => rank == 3,
        Pooling::Mean => rank == 3 || rank == 4,
    };
    if fits {
        Ok(pooling)
    } else {
        Err(format!("pooling = \"{}\" does not fit the output {}", pooling.word(), output.text()))
    }
}

impl Reading {
    /// Length of the vector that an output of these dimensions becomes; an error where tokens run out.
    ///
    /// # Errors
    /// `mean` would be over no tokens. The text is a fragment for a message.
    pub(super) fn dim(&self, outputs: &[Port]) -> Result<usize, String> {
        let dims = &outputs[self.output].dims;
        let axis = match (self.pooling, dims.len()) {
            (Pooling::Cls, _) | (Pooling::Mean, 3) => 2,
            _ => 1,
        };
        let of = |axis: usize| dims.get(axis).and_then(|d| usize::try_from(*d).ok()).unwrap_or(0);
        if axis == 2 && self.pooling == Pooling::Mean && of(1) <= self.prefix_tokens {
            return Err(format!(
                "the mean leaves out the first {} tokens, and the output is {}",
                self.prefix_tokens,
                outputs[self.output].text()
            ));
        }
        Ok(of(axis))
    }

    /// One image's output, `[d]`, `[tokens, d]` or `[d, h, w]`, as one vector. Means are summed in f64.
    pub(super) fn vector(&self, image: ArrayViewD<'_, f32>) -> Vec<f32> {
        let mean = |values: ArrayViewD<'_, f32>| {
            (values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64) as f32
        };
        match (self.pooling, image.ndim()) {
            (Pooling::Vector | Pooling::Pooled | Pooling::Projected, _) => image.iter().copied().collect(),
            (Pooling::Cls, _) if image.len_of(Axis(0)) > 0 => image.index_axis(Axis(0), 0).iter().copied().collect(),
            (Pooling::Cls, _) => Vec::new(),
            (Pooling::Mean, 2) => {
                let skipped = self.prefix_tokens.min(image.len_of(Axis(0)));
                let (_, parts) = image.split_at(Axis(0), skipped);
                parts.axis_iter(Axis(1)).map(mean).collect()
            }
            (Pooling::Mean, _) => image.axis_iter(Axis(0)).map(mean).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{arr1, arr2, arr3};
    use ort::value::TensorElementType;

    use super::*;

    fn output(name: &str, dims: &[i64]) -> Port {
        Port { name: name.to_owned(), kind: Some(TensorElementType::Float32), dims: dims.to_vec() }
    }

    fn config(model_type: &str, register_tokens: Option<usize>) -> HubConfig {
        HubConfig { model_type: Some(model_type.to_owned()), register_tokens, ..HubConfig::default() }
    }

    fn chosen_for<'a>(outputs: &'a [Port], card: &EmbedderCard, config: &HubConfig) -> Option<(&'a str, Pooling)> {
        choose(outputs, card, config).ok().map(|r| (outputs[r.output].name.as_str(), r.pooling))
    }

    fn chosen(outputs: &[Port]) -> Option<(&str, Pooling)> {
        chosen_for(outputs, &EmbedderCard::default(), &HubConfig::default())
    }

    fn reading(pooling: Pooling, prefix_tokens: usize) -> Reading {
        Reading { output: 0, pooling, prefix_tokens }
    }

    #[test]
    fn a_pooled_vector_is_preferred_to_tokens_where_no_family_is_known() {
        let clip = [
            output("last_hidden_state", &[1, 50, 768]),
            output("pooler_output", &[1, 768]),
            output("image_embeds", &[1, 512]),
        ];
        assert_eq!(chosen(&clip), Some(("image_embeds", Pooling::Vector)));
        assert_eq!(chosen(&clip[..2]), Some(("pooler_output", Pooling::Vector)));
        assert_eq!(chosen(&clip[..1]), Some(("last_hidden_state", Pooling::Cls)));
    }

    #[test]
    fn each_family_has_its_own_vector() {
        let tokens = output("last_hidden_state", &[1, 50, 768]);
        let map = output("last_hidden_state", &[1, 768, 7, 7]);
        let pooled = output("pooler_output", &[1, 768]);
        let point = output("pooler_output", &[1, 768, 1, 1]);
        let projected = output("image_embeds", &[1, 512]);
        for (model_type, outputs, expected) in [
            ("clip", vec![&tokens, &pooled, &projected], ("image_embeds", Pooling::Projected)),
            ("clip_vision_model", vec![&tokens, &pooled], ("pooler_output", Pooling::Pooled)),
            ("clip_vision_model", vec![&tokens], ("last_hidden_state", Pooling::Cls)),
            ("siglip", vec![&tokens, &pooled], ("pooler_output", Pooling::Pooled)),
            ("siglip2_vision_model", vec![&tokens], ("last_hidden_state", Pooling::Mean)),
            ("dinov2", vec![&tokens, &pooled], ("last_hidden_state", Pooling::Cls)),
            ("vit", vec![&tokens, &pooled], ("last_hidden_state", Pooling::Cls)),
            ("deit", vec![&pooled], ("pooler_output", Pooling::Pooled)),
            ("convnext", vec![&map, &pooled], ("pooler_output", Pooling::Pooled)),
            ("resnet", vec![&map, &point], ("pooler_output", Pooling::Pooled)),
            ("resnet", vec![&map], ("last_hidden_state", Pooling::Mean)),
            ("swin", vec![&tokens], ("last_hidden_state", Pooling::Mean)),
            ("unheard-of", vec![&tokens, &pooled], ("pooler_output", Pooling::Vector)),
        ] {
            let outputs: Vec<Port> = outputs.into_iter().cloned().collect();
            let found = chosen_for(&outputs, &EmbedderCard::default(), &config(model_type, None));
            assert_eq!(found, Some(expected), "{model_type}");
        }
        let renamed = [output("features", &[1, 384])];
        let found = chosen_for(&renamed, &EmbedderCard::default(), &config("dinov2", None));
        assert_eq!(found, Some(("features", Pooling::Vector)));
    }

    #[test]
    fn the_word_of_the_card_chooses_the_output_too() {
        let all = [
            output("last_hidden_state", &[1, 50, 768]),
            output("pooler_output", &[1, 768]),
            output("image_embeds", &[1, 512]),
        ];
        let clip = config("clip", None);
        let with = |pooling| EmbedderCard { pooling: Some(pooling), ..EmbedderCard::default() };
        for (pooling, name) in [
            (Pooling::Cls, "last_hidden_state"),
            (Pooling::Mean, "last_hidden_state"),
            (Pooling::Pooled, "pooler_output"),
            (Pooling::Projected, "image_embeds"),
            (Pooling::Vector, "image_embeds"),
        ] {
            for config in [&clip, &HubConfig::default()] {
                assert_eq!(chosen_for(&all, &with(pooling), config), Some((name, pooling)));
            }
        }
        let text = choose(&all[..2], &with(Pooling::Projected), &clip).unwrap_err();
        assert!(text.contains("pooling = \"projected\""), "{text}");
    }

    #[test]
    fn the_only_output_of_its_kind_needs_no_name() {
        assert_eq!(chosen(&[output("x", &[1, 768])]), Some(("x", Pooling::Vector)));
        assert_eq!(chosen(&[output("x", &[1, 768, 1, 1])]), Some(("x", Pooling::Vector)));
        assert_eq!(chosen(&[output("x", &[1, 257, 384])]), Some(("x", Pooling::Cls)));
        assert_eq!(chosen(&[output("x", &[1, 1280, 7, 7])]), Some(("x", Pooling::Mean)));
        assert_eq!(chosen(&[output("a", &[1, 768]), output("b", &[1, 10])]), None);
        let named = [output("embedding", &[1, 768]), output("logits", &[1, 10])];
        assert_eq!(chosen(&named), Some(("embedding", Pooling::Vector)));
        assert_eq!(chosen(&[output("scalar", &[1])]), None);
    }

    #[test]
    fn the_card_names_the_output_and_is_checked() {
        let outputs = [output("tokens", &[1, 257, 384]), output("logits", &[1, 10])];
        let with = |outputs: &[Port], output: &str, pooling| {
            let card = EmbedderCard { output: Some(output.to_owned()), pooling, ..EmbedderCard::default() };
            choose(outputs, &card, &HubConfig::default())
        };
        assert_eq!(with(&outputs, "tokens", Some(Pooling::Mean)), Ok(reading(Pooling::Mean, 0)));
        let text = with(&outputs, "tokens", Some(Pooling::Vector)).unwrap_err();
        assert_eq!(text, "pooling = \"vector\" does not fit the output tokens f32 [1, 257, 384]");
        assert!(with(&outputs, "token", None).unwrap_err().contains("no output is called token"));
        let mut whole = outputs.clone();
        whole[0].kind = Some(TensorElementType::Int64);
        assert!(with(&whole, "tokens", None).unwrap_err().contains("holds no f32 or f16"));
    }

    #[test]
    fn tokens_and_maps_are_pooled_along_the_right_axis() {
        let tokens = arr2(&[[1.0, 2.0, 3.0], [3.0, 4.0, 8.0]]).into_dyn();
        assert_eq!(reading(Pooling::Cls, 1).vector(tokens.view()), [1.0, 2.0, 3.0]);
        assert_eq!(reading(Pooling::Mean, 0).vector(tokens.view()), [2.0, 3.0, 5.5]);
        let map = arr3(&[[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.0], [0.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]]]).into_dyn();
        assert_eq!(reading(Pooling::Mean, 1).vector(map.view()), [3.0, 1.0, 1.0]);
        assert_eq!(reading(Pooling::Vector, 0).vector(arr1(&[1.0, 2.0]).into_dyn().view()), [1.0, 2.0]);
        let point = arr3(&[[[1.0]], [[2.0]]]).into_dyn();
        assert_eq!(reading(Pooling::Pooled, 0).vector(point.view()), [1.0, 2.0]);
    }

    #[test]
    fn a_mean_leaves_out_the_class_token_and_the_registers() {
        let tokens = [output("last_hidden_state", &[1, 6, 2])];
        let mean = EmbedderCard { pooling: Some(Pooling::Mean), ..EmbedderCard::default() };
        let prefix = |config: &HubConfig| choose(&tokens, &mean, config).unwrap().prefix_tokens;
        assert_eq!(prefix(&config("dinov2", None)), 1);
        assert_eq!(prefix(&config("dinov3_vit", Some(4))), 5);
        assert_eq!(prefix(&config("deit", None)), 2);
        assert_eq!(prefix(&HubConfig::default()), 0);
        let card = EmbedderCard { prefix_tokens: Some(3), ..mean.clone() };
        assert_eq!(choose(&tokens, &card, &config("dinov2", None)).unwrap().prefix_tokens, 3);
        let rows = arr2(&[[9.0, 9.0], [8.0, 8.0], [1.0, 2.0], [3.0, 6.0]]).into_dyn();
        assert_eq!(reading(Pooling::Mean, 2).vector(rows.view()), [2.0, 4.0]);
        assert!(reading(Pooling::Mean, 6).dim(&tokens).unwrap_err().contains("leaves out the first 6 tokens"));
        assert_eq!(reading(Pooling::Mean, 5).dim(&tokens), Ok(2));
    }

    #[test]
    fn the_dimension_is_read_from_the_axis_that_is_kept() {
        for (dims, pooling, dim) in [
            (&[1, 1280][..], Pooling::Vector, 1280),
            (&[1, 48, 1, 1], Pooling::Pooled, 48),
            (&[1, 257, 384], Pooling::Cls, 384),
            (&[1, 257, 384], Pooling::Mean, 384),
            (&[1, 1280, 7, 7], Pooling::Mean, 1280),
        ] {
            assert_eq!(reading(pooling, 0).dim(&[output("x", dims)]), Ok(dim));
        }
    }
}
