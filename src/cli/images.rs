//! The flags of data that is a folder of images.

use std::path::Path;
use std::str::FromStr;

use clap::Args;
use meganeura::data::{Channels, Filter, Fit, Layout};
use meganeura::{Bindings, Dataset, Error, ImageOptions, Model};

use super::Failure;

#[derive(Debug, Args)]
pub struct ImageArgs {
    /// Width and height of images [default: those of the model's input, of its metadata or of its preprocessor_config.json]
    #[arg(long = "image-size", value_name = "WxH", value_parser = parse_size)]
    size: Option<(usize, usize)>,
    /// How images of other proportions fit: stretch, crop (cover the size, keep the middle), crop=N (resize the shorter side to N, keep the
    /// middle) or letterbox [default: stretch, or what the model says]
    #[arg(long = "image-resize", value_name = "FIT")]
    resize: Option<Fit>,
    /// The filter that resizes: bilinear or bicubic, as Pillow's, which antialias [default: bilinear]
    #[arg(long = "image-filter", value_name = "FILTER")]
    filter: Option<Filter>,
    /// The channels of images: rgb, bgr or gray [default: by the model's input]
    #[arg(long = "image-channels", value_name = "CHANNELS")]
    channels: Option<Channels>,
    /// Where the channels are: nchw or nhwc [default: by the model's input]
    #[arg(long = "image-layout", value_name = "LAYOUT")]
    layout: Option<Layout>,
    /// What the bytes of pixels are multiplied by first [default: 1/255]
    #[arg(long = "image-scale", value_name = "X", value_parser = parse_scale)]
    scale: Option<f64>,
    /// What is subtracted then: one number, or one for each channel [default: 0]
    #[arg(long = "image-mean", value_name = "X,..", value_parser = parse_numbers, allow_hyphen_values = true)]
    mean: Option<Numbers>,
    /// What is divided by last: one number, or one for each channel [default: 1]
    #[arg(long = "image-std", value_name = "X,..", value_parser = parse_numbers)]
    std: Option<Numbers>,
}

#[derive(Clone, Debug)]
struct Numbers(Vec<f64>);

impl ImageArgs {
    fn options(&self) -> ImageOptions {
        ImageOptions {
            size: self.size,
            fit: self.resize,
            filter: self.filter,
            channels: self.channels,
            layout: self.layout,
            scale: self.scale,
            mean: self.mean.as_ref().map(|numbers| numbers.0.clone()),
            std: self.std.as_ref().map(|numbers| numbers.0.clone()),
        }
    }

    /// Opens a data file, or a folder of images with these flags.
    ///
    /// # Errors
    /// The data cannot be read, or there are flags for images and the data is a file.
    pub fn open(&self, path: &Path, model: &Model, bindings: &Bindings, classes: Option<&[String]>) -> Result<Dataset, Failure> {
        let options = self.options();
        if path.is_dir() {
            let preprocessing = model.image_preprocessing(bindings, options)?;
            return Ok(Dataset::open_images(path, preprocessing, classes).map_err(Error::from)?);
        }
        if options != ImageOptions::default() {
            return Err(Failure::input(format!("{} is no folder of images: --image-.. means nothing to it", path.display())));
        }
        Ok(Dataset::open(path).map_err(Error::from)?)
    }
}

fn parse_size(text: &str) -> Result<(usize, usize), String> {
    let side = |text: &str| usize::from_str(text.trim()).ok().filter(|side| *side > 0);
    let size = text.split_once('x').and_then(|(width, height)| Some((side(width)?, side(height)?)));
    size.ok_or_else(|| "write WxH, for instance 224x224".to_owned())
}

fn parse_scale(text: &str) -> Result<f64, String> {
    let value = text
        .split_once('/')
        .map_or_else(|| text.trim().parse().ok(), |(a, b)| Some(a.trim().parse::<f64>().ok()? / b.trim().parse::<f64>().ok()?));
    value.filter(|v: &f64| v.is_finite()).ok_or_else(|| format!("{text:?} is no number such as 0.5 or 1/255"))
}

fn parse_numbers(text: &str) -> Result<Numbers, String> {
    let numbers = text.split(',').map(|part| part.trim().parse::<f64>().ok().filter(|v| v.is_finite())).collect::<Option<_>>();
    numbers.map(Numbers).ok_or_else(|| "write numbers with commas between them".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_scales_and_lists_are_parsed() {
        assert_eq!(parse_size("640x480"), Ok((640, 480)));
        assert!(parse_size("640").is_err() && parse_size("0x1").is_err());
        assert_eq!((parse_scale("1/4"), parse_scale("2")), (Ok(0.25), Ok(2.0)));
        assert!(parse_scale("1/0").is_err() && parse_scale("x").is_err());
        assert_eq!(parse_numbers("0.5, -1").unwrap().0, [0.5, -1.0]);
        assert!(parse_numbers("").is_err() && parse_numbers("1,nan").is_err());
    }
}
