//! Values of flags: sizes, devices, counts. Each error says what would have been right.

use std::path::PathBuf;

use croprow::config::{Device, MaxFailures, Vram};
use croprow::recipe::Keep;

/// A path, or the word `none`. Not an `Option`: clap takes that for a flag that may be left out.
#[derive(Clone, Debug)]
pub(crate) struct PathOrNone(pub(crate) Option<PathBuf>);

/// `none`, or a path made absolute: a remembered setting must not depend on the current folder.
pub(crate) fn path_or_none(text: &str) -> Result<PathOrNone, String> {
    match text {
        "none" => Ok(PathOrNone(None)),
        "" => Err("is empty; give a path, or `none`".into()),
        path => std::path::absolute(path).map(|p| PathOrNone(Some(p))).map_err(|e| e.to_string()),
    }
}

/// `auto`, or a count of at least 1.
pub(crate) fn count_or_auto(text: &str) -> Result<OrAuto, String> {
    if text == "auto" { Ok(OrAuto(None)) } else { count(text).map(|n| OrAuto(Some(n))) }
}

/// `auto`, or a size.
pub(crate) fn size_or_auto(text: &str) -> Result<OrAuto, String> {
    if text == "auto" { Ok(OrAuto(None)) } else { size_bytes(text).map(|n| OrAuto(Some(n))) }
}

/// A number, or the word `auto`. Not an `Option`, for the reason above.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OrAuto(pub(crate) Option<u64>);

/// `4GiB`, `512MiB`, `2GB`, `1048576`.
pub(crate) fn size_bytes(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "kb" => 1_000,
        "m" | "mib" => 1 << 20,
        "mb" => 1_000_000,
        "g" | "gib" => 1 << 30,
        "gb" => 1_000_000_000,
        "t" | "tib" => 1 << 40,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("unknown unit `{unit}`; write a size as 4GiB or 512MiB")),
    };
    match number.parse::<f64>() {
        Ok(value) if value > 0.0 => Ok((value * factor as f64) as u64),
        _ => Err("write a size as 4GiB or 512MiB".into()),
    }
}

/// `80%` of the GPU's memory, or `6GiB`.
pub(crate) fn vram(text: &str) -> Result<Vram, String> {
    match text.trim().strip_suffix('%') {
        None => size_bytes(text).map(Vram::Bytes),
        Some(number) => match number.trim().parse::<f32>() {
            Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(Vram::Share(percent / 100.0)),
            _ => Err("write a share as 80%, or a size as 6GiB".into()),
        },
    }
}

/// `auto`, `cpu`, `cuda`, `cuda:1`.
pub(crate) fn device(text: &str) -> Result<Device, String> {
    match text {
        "auto" => Ok(Device::Auto),
        "cpu" => Ok(Device::Cpu),
        "cuda" => Ok(Device::Cuda(0)),
        _ => text
            .strip_prefix("cuda:")
            .and_then(|n| n.parse().ok())
            .map(Device::Cuda)
            .ok_or_else(|| "write auto, cpu, cuda or cuda:N".into()),
    }
}

/// `all`, `best`, or a count.
pub(crate) fn keep(text: &str) -> Result<Keep, String> {
    match text {
        "all" => Ok(Keep::All),
        "best" => Ok(Keep::Best(1)),
        _ => match text.parse() {
            Ok(n) if n > 0 => Ok(Keep::Best(n)),
            _ => Err("write all, best, or a count of at least 1".into()),
        },
    }
}

/// A share between 0 and 1.
pub(crate) fn share(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("write a number from 0 to 1, as 0.3".into()),
    }
}

/// A length in pixels, of at least 1.
pub(crate) fn pixels(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(value) if value >= 1.0 && value.is_finite() => Ok(value),
        _ => Err("write a number of pixels of at least 1".into()),
    }
}

/// With longer steps most of a tensor would be filling.
const STEP_MOST_PX: u32 = 1024;

/// Pixels, or the word `none`. Not an `Option`: clap takes that for a flag that may be left out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepOrNone(pub(crate) Option<u32>);

/// `none`, or a step of 2 to 1024 pixels: one of 1 is none.
pub(crate) fn step_or_none(text: &str) -> Result<StepOrNone, String> {
    match text.parse() {
        _ if text == "none" => Ok(StepOrNone(None)),
        Ok(step_px) if (2..=STEP_MOST_PX).contains(&step_px) => Ok(StepOrNone(Some(step_px))),
        _ => Err(format!("write a number of pixels from 2 to {STEP_MOST_PX}, as 64, or `none`")),
    }
}

/// A text, or the word `none`. Not an `Option`: clap takes that for a flag that may be left out.
#[derive(Clone, Debug)]
pub(crate) struct TextOrNone(pub(crate) Option<String>);

/// A text that is not empty, or `none`.
pub(crate) fn text_or_none(text: &str) -> Result<TextOrNone, String> {
    match text.trim() {
        "" => Err("is empty; give labels as \"a cat. a dog.\", or `none`".into()),
        "none" => Ok(TextOrNone(None)),
        text => Ok(TextOrNone(Some(text.to_owned()))),
    }
}

/// A condition, or `none`.
pub(crate) fn condition_or_none(text: &str) -> Result<TextOrNone, String> {
    match text.trim() {
        "" => Err("is empty; give a condition as \"tag = 'holiday'\", or `none`".into()),
        "none" => Ok(TextOrNone(None)),
        text => Ok(TextOrNone(Some(text.to_owned()))),
    }
}

/// `--max-failures`, or the word `none`. Not an `Option`: clap takes that for a flag that may be left out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MaxFailuresOrNone(pub(crate) Option<MaxFailures>);

/// `100`, `5%`, `none`.
pub(crate) fn max_failures_or_none(text: &str) -> Result<MaxFailuresOrNone, String> {
    let most = match (text, text.strip_suffix('%')) {
        ("none", _) => None,
        (_, Some(number)) => match number.trim().parse::<f32>() {
            Ok(percent) if (0.0..100.0).contains(&percent) => Some(MaxFailures::Percent(percent)),
            _ => return Err("write a share from 0% to less than 100%".into()),
        },
        (_, None) => match text.replace('_', "").parse() {
            Ok(rows) => Some(MaxFailures::Rows(rows)),
            Err(_) => return Err("write a number of rows as 100, a share as 5%, or none".into()),
        },
    };
    Ok(MaxFailuresOrNone(most))
}

/// A count of at least 1.
pub(crate) fn count(text: &str) -> Result<u64, String> {
    match text.replace('_', "").parse::<u64>() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("write a whole number of at least 1".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        for (text, bytes) in
            [("4GiB", 4 << 30), ("1.5GiB", 3 << 29), ("512 MiB", 512 << 20), ("2GB", 2_000_000_000), ("100", 100)]
        {
            assert_eq!(size_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "-1GiB", "4XB", "0", "NaN"] {
            assert!(size_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn gpu_memory_is_a_share_or_a_size() {
        assert_eq!(vram("80%"), Ok(Vram::Share(0.8)));
        assert_eq!(vram("6GiB"), Ok(Vram::Bytes(6 << 30)));
        assert!(["0%", "101%", "-5%", "x%", "NaN%", ""].iter().all(|text| vram(text).is_err()));
    }

    #[test]
    fn failures_that_are_allowed_are_a_number_a_share_or_none() {
        let most = |text| max_failures_or_none(text).map(|most| most.0);
        assert_eq!(most("100"), Ok(Some(MaxFailures::Rows(100))));
        assert_eq!(most("0"), Ok(Some(MaxFailures::Rows(0))), "the first failure ends the run");
        assert_eq!(most("2.5%"), Ok(Some(MaxFailures::Percent(2.5))));
        assert_eq!(most("none"), Ok(None));
        assert!(["", "%", "100%", "-1", "-1%", "NaN%", "many"].iter().all(|text| most(text).is_err()));
    }

    #[test]
    fn devices_and_counts_are_read() {
        assert_eq!(device("cuda"), Ok(Device::Cuda(0)));
        assert_eq!(device("cuda:3"), Ok(Device::Cuda(3)));
        assert!(device("gpu").is_err() && device("cuda:").is_err() && device("cuda:-1").is_err());
        assert_eq!(keep("best"), Ok(Keep::Best(1)));
        assert!(keep("0").is_err() && share("1.1").is_err() && share("NaN").is_err() && count("0").is_err());
    }
}
