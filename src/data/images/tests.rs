use std::path::Path;

use meganeura_import::{Dim, ModelInput};
use meganeura_ir::DType;
use ndarray::Array3;
use ndarray_npy::NpzReader;

use super::*;
use crate::data::Dataset;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/images").join(path)
}

fn expected(name: &str) -> Vec<u8> {
    let mut reader = NpzReader::new(fs::File::open(fixture("expect.npz")).unwrap()).unwrap();
    let array: Array3<u8> = reader.by_name(&format!("{name}.npy")).unwrap();
    array.iter().copied().collect()
}

fn input(dtype: DType, dims: [Option<usize>; 4]) -> ModelInput {
    let dims = dims.iter().enumerate().map(|(axis, dim)| dim.map_or(Dim::Symbol(format!("d{axis}")), Dim::Fixed)).collect();
    ModelInput { name: "image".to_owned(), dtype, dims, ranked: true }
}

fn preprocessing(
    dtype: DType,
    dims: [Option<usize>; 4],
    options: ImageOptions,
) -> Result<ImagePreprocessing, PreprocessingError> {
    ImagePreprocessing::new(&[input(dtype, dims)], &options)
}

/// What a model of bytes sees of the first dark image.
fn seen(options: ImageOptions) -> Vec<u8> {
    let channels = options.channels.map_or(3, Channels::count);
    let preprocessing = preprocessing(DType::U8, [None, Some(12), Some(16), Some(channels)], options).unwrap();
    let folder = ImageFolder::open(&fixture("folder"), preprocessing, None).unwrap();
    assert_eq!(
        (folder.classes(), folder.labels()),
        (["bright", "dark"].map(String::from).as_slice(), [0, 0, 0, 1, 1, 1].as_slice())
    );
    folder.rows(&[3]).unwrap().bytes().to_vec()
}

#[test]
fn every_way_to_fit_is_pillows() {
    let fit = |fit| ImageOptions { fit: Some(fit), ..ImageOptions::default() };
    assert_eq!(seen(ImageOptions::default()), expected("stretch"));
    assert_eq!(seen(fit(Fit::Crop { shortest: None })), expected("crop"));
    assert_eq!(seen(fit(Fit::Crop { shortest: Some(20) })), expected("crop-20"));
    assert_eq!(seen(fit(Fit::Letterbox)), expected("letterbox"));
    assert_eq!(seen(ImageOptions { channels: Some(Channels::Gray), ..ImageOptions::default() }), expected("gray"));
    let bgr = seen(ImageOptions { channels: Some(Channels::Bgr), ..ImageOptions::default() });
    assert!(bgr.chunks(3).zip(expected("stretch").chunks(3)).all(|(bgr, rgb)| bgr.iter().eq(rgb.iter().rev())));
}

#[test]
fn jpeg_decoders_differ_by_rounding_only() {
    let found = decode(&fixture("folder/bright/c.jpg")).unwrap().data;
    let differences: Vec<i32> = found.iter().zip(expected("jpeg")).map(|(a, b)| (i32::from(*a) - i32::from(b)).abs()).collect();
    let mean = differences.iter().sum::<i32>() as f64 / differences.len() as f64;
    assert!(mean < 1.5 && differences.iter().all(|d| *d <= 24), "{mean}, {:?}", differences.iter().max());
}

#[test]
fn floats_are_normalised_by_channel_in_the_layout_of_the_model() {
    let options = ImageOptions { mean: Some(vec![0.5, 0.25, 0.125]), std: Some(vec![2.0]), ..ImageOptions::default() };
    let of = |dims| preprocessing(DType::F32, dims, options.clone()).unwrap();
    let (first, last) = (of([None, Some(3), Some(12), Some(16)]), of([Some(1), Some(12), Some(16), Some(3)]));
    assert_eq!((first.layout, last.layout), (Layout::Nchw, Layout::Nhwc));
    let bytes = expected("stretch");
    let value = |pixel: usize, channel: usize| {
        ((f64::from(bytes[pixel * 3 + channel]) / 255.0 - [0.5, 0.25, 0.125][channel]) / 2.0) as f32
    };
    let rows = |p| ImageFolder::open(&fixture("folder"), p, None).unwrap().rows(&[3]).unwrap().to_f64_vec();
    let (first, last) = (rows(first), rows(last));
    for (pixel, channel) in [(0, 0), (5, 1), (191, 2)] {
        assert_eq!(first[channel * 192 + pixel] as f32, value(pixel, channel));
        assert_eq!(last[pixel * 3 + channel] as f32, value(pixel, channel));
    }
}

#[test]
fn what_is_fetched_ahead_is_what_is_asked_for() {
    let folder = || {
        let p = preprocessing(DType::F32, [None, Some(3), Some(12), Some(16)], ImageOptions::default()).unwrap();
        ImageFolder::open(&fixture("folder"), p, None).unwrap()
    };
    let (plain, ahead) = (folder(), folder());
    for (fetched, wanted) in [([0, 4], [0, 4]), ([1, 2], [5, 0]), ([3, 3], [3, 3])] {
        ahead.prefetch(&fetched);
        ahead.prefetch(&fetched);
        assert_eq!(ahead.rows(&wanted).unwrap(), plain.rows(&wanted).unwrap());
    }
}

#[test]
fn a_broken_image_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let class = folder.path().join("only");
    fs::create_dir(&class).unwrap();
    let png = fs::read(fixture("folder/dark/a.png")).unwrap();
    let mut huge = png.clone();
    // The header says 65,535 by 65,535 pixels, with a checksum that fits.
    huge[16..24].copy_from_slice(&[0, 0, 0xff, 0xff, 0, 0, 0xff, 0xff]);
    let crc = crc32(&huge[12..29]);
    huge[29..33].copy_from_slice(&crc.to_be_bytes());
    for (name, bytes, part) in [
        ("cut.png", &png[..png.len() / 2], "cut.png"),
        ("text.jpg", b"no image".as_slice(), "text.jpg"),
        ("empty.png", b"".as_slice(), "empty.png"),
        ("huge.png", &huge, "huge.png"),
    ] {
        fs::write(class.join(name), bytes).unwrap();
        let p = preprocessing(DType::F32, [None, Some(3), Some(8), Some(8)], ImageOptions::default()).unwrap();
        let found = ImageFolder::open(folder.path(), p, None).unwrap();
        for ahead in [false, true] {
            if ahead {
                found.prefetch(&[0]);
            }
            let message = found.rows(&[0]).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
        fs::remove_file(class.join(name)).unwrap();
    }
}

/// The checksum of PNG chunks.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| if c & 1 == 1 { 0xedb8_8320 ^ (c >> 1) } else { c >> 1 })
    };
    !bytes.iter().fold(!0, step)
}

#[test]
fn folders_that_are_no_classes_are_refused() {
    let open = |path: &Path, classes: Option<&[String]>| {
        let p = preprocessing(DType::F32, [None, Some(3), Some(8), Some(8)], ImageOptions::default()).unwrap();
        ImageFolder::open(path, p, classes).map(|found| found.labels().to_vec()).map_err(|e| e.to_string())
    };
    let folder = tempfile::tempdir().unwrap();
    assert!(open(folder.path(), None).unwrap_err().contains("holds no folders"));
    fs::create_dir(folder.path().join("cat")).unwrap();
    assert!(open(folder.path(), None).unwrap_err().contains("\"cat\" has no image"));
    fs::write(folder.path().join("cat/a.webp"), "x").unwrap();
    assert!(open(folder.path(), None).unwrap_err().contains("a.webp"));
    let known = ["dark", "bright", "dim"].map(String::from);
    assert_eq!(open(&fixture("folder"), Some(&known)), Ok(vec![1, 1, 1, 0, 0, 0]));
    assert!(open(&fixture("folder"), Some(&known[..1])).unwrap_err().contains("\"bright\" is none of the 1 classes"));
}

#[test]
fn what_is_not_known_is_asked_for() {
    let of = |options: ImageOptions| preprocessing(DType::F32, [None; 4], options).map(|p| (p.width, p.height));
    let message = of(ImageOptions::default()).unwrap_err().to_string();
    assert!(message.contains("--image-size"), "{message}");
    assert_eq!(of(ImageOptions { size: Some((5, 6)), ..ImageOptions::default() }), Ok((5, 6)));
    let numbers = ImageOptions { size: Some((5, 6)), mean: Some(vec![0.0; 2]), ..ImageOptions::default() };
    assert!(matches!(of(numbers), Err(PreprocessingError::Count { found: 2, channels: 3, .. })));
    let vector = ModelInput { dims: vec![Dim::Fixed(3)], ..input(DType::F32, [None; 4]) };
    assert!(matches!(ImagePreprocessing::new(&[vector], &ImageOptions::default()), Err(PreprocessingError::NoInput { .. })));
}

#[test]
fn a_folder_is_no_file() {
    assert!(Dataset::open(fixture("folder")).unwrap_err().to_string().contains("is a folder"));
}
