//! What happens to an image before a model sees it: where it is said, and how it is done.

use std::str::FromStr;

use meganeura_import::{Dim, ModelInput};
use meganeura_ir::{DType, TensorType};

use super::resample::{Filter, Pixels};

/// What is around a letterboxed image: the grey of the detectors that letterbox.
const PADDING: u8 = 114;

/// How an image of another shape comes to the size of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fit {
    /// Both sides are resized, whatever that does to the proportions.
    #[default]
    Stretch,
    /// The shorter side is resized, to `shortest` or so far that the image covers the size; then the middle is taken.
    Crop { shortest: Option<usize> },
    /// The image is resized to fit into the size; the rest is grey.
    Letterbox,
}

impl FromStr for Fit {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let shortest = |n: &str| n.parse().ok().filter(|&n: &usize| n > 0).map(|n| Fit::Crop { shortest: Some(n) });
        let named = match text {
            "stretch" => Some(Fit::Stretch),
            "crop" => Some(Fit::Crop { shortest: None }),
            "letterbox" => Some(Fit::Letterbox),
            _ => text.strip_prefix("crop=").and_then(shortest),
        };
        named.ok_or_else(|| "choose stretch, crop, crop=N (resize the shorter side to N first) or letterbox".to_owned())
    }
}

/// The channels of a pixel, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channels {
    Rgb,
    Bgr,
    /// The luma of ITU-R 601-2, as Pillow's `L`.
    Gray,
}

impl Channels {
    pub fn count(self) -> usize {
        if self == Channels::Gray { 1 } else { 3 }
    }
}

impl FromStr for Channels {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "rgb" => Ok(Channels::Rgb),
            "bgr" => Ok(Channels::Bgr),
            "gray" => Ok(Channels::Gray),
            _ => Err("choose rgb, bgr or gray".to_owned()),
        }
    }
}

/// Where the channels are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Nchw,
    Nhwc,
}

impl FromStr for Layout {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "nchw" => Ok(Layout::Nchw),
            "nhwc" => Ok(Layout::Nhwc),
            _ => Err("choose nchw or nhwc".to_owned()),
        }
    }
}

/// What somebody says about the images of a model: the user, or the model's own files. The rest follows from the model's input.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImageOptions {
    /// Width and height.
    pub size: Option<(usize, usize)>,
    pub fit: Option<Fit>,
    pub filter: Option<Filter>,
    pub channels: Option<Channels>,
    pub layout: Option<Layout>,
    /// What a byte is multiplied by, before the mean is subtracted. 1/255 by default.
    pub scale: Option<f64>,
    /// One number, or one for each channel; 0 by default.
    pub mean: Option<Vec<f64>>,
    /// One number, or one for each channel; 1 by default.
    pub std: Option<Vec<f64>>,
}

impl ImageOptions {
    /// What `self` does not say, `other` does.
    pub fn or(self, other: ImageOptions) -> ImageOptions {
        ImageOptions {
            size: self.size.or(other.size),
            fit: self.fit.or(other.fit),
            filter: self.filter.or(other.filter),
            channels: self.channels.or(other.channels),
            layout: self.layout.or(other.layout),
            scale: self.scale.or(other.scale),
            mean: self.mean.or(other.mean),
            std: self.std.or(other.std),
        }
    }
}

/// Why it is not known what a model wants images to be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PreprocessingError {
    #[error("the model has no input of images, which are floats or bytes of 4 axes; its inputs are {}", inputs.join(", "))]
    NoInput { inputs: Vec<String> },
    #[error("the model has several inputs that could be images, {}", inputs.join(", "))]
    SeveralInputs { inputs: Vec<String> },
    #[error("the model leaves the size of its images {input:?} open: say it with --image-size WxH")]
    NoSize { input: String },
    #[error("--image-size {width}x{height} is too large: at most 65,536 pixels a side and 2^28 in all")]
    TooLarge { width: usize, height: usize },
    #[error("--image-{option} has {found} numbers for {channels} channels: give one, or one for each channel")]
    Count { option: &'static str, found: usize, channels: usize },
    #[error("--image-std must not be 0")]
    ZeroStd,
    #[error("the model takes the bytes of images: --image-scale, --image-mean and --image-std mean nothing to it")]
    Bytes,
    #[error("{file}: {reason}")]
    Description { file: String, reason: String },
}

/// All that happens to an image: resizing as Pillow does it, then `(byte * scale - mean) / std` for each channel.
#[derive(Clone, Debug, PartialEq)]
pub struct ImagePreprocessing {
    /// The input of the model that takes the images.
    pub input: String,
    pub width: usize,
    pub height: usize,
    pub fit: Fit,
    pub filter: Filter,
    pub channels: Channels,
    pub layout: Layout,
    /// F32, or U8 for models that take bytes.
    dtype: DType,
    /// The number that stands for each byte, by channel.
    values: Vec<[f32; 256]>,
}

impl ImagePreprocessing {
    /// What the model's inputs and `options` make together.
    ///
    /// # Errors
    /// There is not one input of images, or something about it is not known or contradictory.
    pub fn new(inputs: &[ModelInput], options: &ImageOptions) -> Result<Self, PreprocessingError> {
        let input = image_input(inputs)?;
        let fixed = |axis: usize| match input.dims.get(axis) {
            Some(Dim::Fixed(size)) => Some(*size),
            _ => None,
        };
        let is_channels = |axis| matches!(fixed(axis), Some(1 | 3));
        let layout = options.layout.unwrap_or(if !is_channels(1) && is_channels(3) { Layout::Nhwc } else { Layout::Nchw });
        let (rows, columns, channels) = match layout {
            Layout::Nchw => (2, 3, 1),
            Layout::Nhwc => (1, 2, 3),
        };
        let channels = options.channels.unwrap_or(if fixed(channels) == Some(1) { Channels::Gray } else { Channels::Rgb });
        let declared = fixed(columns).zip(fixed(rows));
        let size = options.size.or(declared).ok_or_else(|| PreprocessingError::NoSize { input: input.name.clone() })?;
        let (width, height) = size;
        let most = 1 << 16;
        if width == 0 || height == 0 || width > most || height > most || width * height > 1 << 28 {
            return Err(PreprocessingError::TooLarge { width, height });
        }
        let normalised = options.scale.is_some() || options.mean.is_some() || options.std.is_some();
        if input.dtype == DType::U8 && normalised {
            return Err(PreprocessingError::Bytes);
        }
        let dtype = if input.dtype == DType::U8 { DType::U8 } else { DType::F32 };
        let numbers = |option: &'static str, given: &Option<Vec<f64>>, default: f64| match given.as_deref() {
            None => Ok(vec![default; channels.count()]),
            Some([one]) => Ok(vec![*one; channels.count()]),
            Some(all) if all.len() == channels.count() => Ok(all.to_vec()),
            Some(all) => Err(PreprocessingError::Count { option, found: all.len(), channels: channels.count() }),
        };
        let (mean, std) = (numbers("mean", &options.mean, 0.0)?, numbers("std", &options.std, 1.0)?);
        if std.contains(&0.0) {
            return Err(PreprocessingError::ZeroStd);
        }
        let scale = options.scale.unwrap_or(1.0 / 255.0);
        let table = |(mean, std): (f64, f64)| std::array::from_fn(|byte| ((byte as f64 * scale - mean) / std) as f32);
        Ok(ImagePreprocessing {
            input: input.name.clone(),
            width,
            height,
            fit: options.fit.unwrap_or_default(),
            filter: options.filter.unwrap_or_default(),
            channels,
            layout,
            dtype,
            values: mean.into_iter().zip(std).map(table).collect(),
        })
    }

    /// The type of `samples` images.
    pub fn ty(&self, samples: usize) -> TensorType {
        let (width, height, channels) = (self.width, self.height, self.channels.count());
        let shape = match self.layout {
            Layout::Nchw => [samples, channels, height, width],
            Layout::Nhwc => [samples, height, width, channels],
        };
        TensorType::new(self.dtype, shape)
    }

    /// The elements of one sample, as they lie in a tensor, of pixels whose channels are R, G and B.
    pub(super) fn elements(&self, rgb: Pixels) -> Vec<u8> {
        let image = self.fitted(self.in_channels(rgb));
        let (channels, pixels) = (image.channels, image.width * image.height);
        let mut out = Vec::with_capacity(image.data.len() * self.dtype.size());
        let mut push = |channel: usize, byte: u8| match self.dtype {
            DType::U8 => out.push(byte),
            _ => out.extend(self.values[channel][usize::from(byte)].to_le_bytes()),
        };
        match self.layout {
            Layout::Nhwc => {
                image.data.chunks_exact(channels).for_each(|p| p.iter().enumerate().for_each(|(c, &byte)| push(c, byte)))
            }
            Layout::Nchw => {
                (0..channels).for_each(|c| (0..pixels).for_each(|p| push(c, image.data[p * channels + c])));
            }
        }
        out
    }

    fn in_channels(&self, rgb: Pixels) -> Pixels {
        match self.channels {
            Channels::Rgb => rgb,
            Channels::Bgr => Pixels { data: rgb.data.chunks_exact(3).flat_map(|p| [p[2], p[1], p[0]]).collect(), ..rgb },
            Channels::Gray => {
                let luma = |p: &[u8]| [19595, 38470, 7471].iter().zip(p).map(|(w, &v)| w * u32::from(v)).sum::<u32>() + 0x8000;
                Pixels { channels: 1, data: rgb.data.chunks_exact(3).map(|p| (luma(p) >> 16) as u8).collect(), ..rgb }
            }
        }
    }

    fn fitted(&self, image: Pixels) -> Pixels {
        let (width, height) = (self.width, self.height);
        let ratios = (width as f64 / image.width as f64, height as f64 / image.height as f64);
        let middle = |large: usize, small: usize| (large as f64 - small as f64) / 2.0;
        match self.fit {
            Fit::Stretch => image.resized(width, height, self.filter),
            Fit::Crop { shortest } => {
                let (w, h) = (image.width as u128, image.height as u128);
                // Integer division, as torchvision's Resize of the shorter side.
                let (new_width, new_height) = match shortest {
                    Some(side) if w <= h => (side, (side as u128 * h / w) as usize),
                    Some(side) => ((side as u128 * w / h) as usize, side),
                    None if ratios.0 >= ratios.1 => (width, ((width as u128 * h / w) as usize).max(height)),
                    None => (((height as u128 * w / h) as usize).max(width), height),
                };
                let resized = image.resized(new_width.max(1), new_height.max(1), self.filter);
                let (left, top) = (middle(resized.width, width), middle(resized.height, height));
                resized.window(left.round_ties_even() as isize, top.round_ties_even() as isize, width, height, 0)
            }
            Fit::Letterbox => {
                let ratio = ratios.0.min(ratios.1);
                let side = |size: usize, most: usize| ((size as f64 * ratio).round_ties_even() as usize).clamp(1, most);
                let resized = {
                    let (w, h) = (side(image.width, width), side(image.height, height));
                    image.resized(w, h, self.filter)
                };
                let (left, top) = (middle(width, resized.width), middle(height, resized.height));
                let before = |margin: f64| -((margin - 0.1).round() as isize);
                resized.window(before(left), before(top), width, height, PADDING)
            }
        }
    }
}

/// The only input that can take images.
fn image_input(inputs: &[ModelInput]) -> Result<&ModelInput, PreprocessingError> {
    let takes_images =
        |input: &&ModelInput| (!input.ranked || input.dims.len() == 4) && (input.dtype.is_float() || input.dtype == DType::U8);
    let found: Vec<&ModelInput> = inputs.iter().filter(takes_images).collect();
    let names = |inputs: Vec<&ModelInput>| inputs.into_iter().map(|input| input.name.clone()).collect();
    match found[..] {
        [input] => Ok(input),
        [] => Err(PreprocessingError::NoInput { inputs: names(inputs.iter().collect()) }),
        _ => Err(PreprocessingError::SeveralInputs { inputs: names(found) }),
    }
}
