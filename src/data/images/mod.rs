//! A folder of class folders with images.
//!
//! Files are decoded when a batch needs them, by several threads, and the batch after it while the device computes: memory holds two batches,
//! however many images there are.

mod description;
mod preprocessing;
mod resample;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::{BufReader, ErrorKind};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use image::{DynamicImage, ImageDecoder, ImageReader};
use meganeura_ir::{Tensor, TensorType};

use super::DataError;
pub(crate) use description::{NAMES_KEY, class_names, described, written_names};
pub use preprocessing::{Channels, Fit, ImageOptions, ImagePreprocessing, Layout, PreprocessingError};
pub use resample::Filter;
use resample::Pixels;

/// Extensions of the files that are read.
const EXTENSIONS: [&str; 3] = ["png", "jpg", "jpeg"];
/// Extensions of images that are not: leaving them out silently would train on a part of the data.
const UNREADABLE: [&str; 11] = ["avif", "bmp", "gif", "heic", "jfif", "jp2", "jxl", "ppm", "tif", "tiff", "webp"];
/// Pixels of the largest image that is decoded.
const MAX_PIXELS: u64 = 1 << 26;

/// Image files and their classes, and what happens to an image before the model sees it.
#[derive(Debug)]
pub struct ImageFolder {
    files: Vec<PathBuf>,
    labels: Vec<i64>,
    classes: Vec<String>,
    preprocessing: Arc<ImagePreprocessing>,
    ahead: Mutex<Option<Ahead>>,
}

/// A batch that a thread decodes.
#[derive(Debug)]
struct Ahead {
    indices: Vec<usize>,
    decoding: JoinHandle<Result<Vec<u8>, DataError>>,
}

impl ImageFolder {
    /// Lists the images below `path/CLASS/`. The index of a class is that in `classes`, or of its folder among the folders in order of their
    /// names.
    ///
    /// # Errors
    /// A folder cannot be listed, has no image, or is none of `classes`; an image is of a kind that is not read here.
    pub fn open(path: &Path, preprocessing: ImagePreprocessing, classes: Option<&[String]>) -> Result<Self, DataError> {
        let folder = |reason: String| DataError::ImageFolder { path: path.to_path_buf(), reason };
        let folders = entries(path)?.into_iter().filter(|entry| entry.is_dir()).collect::<Vec<_>>();
        let name = |folder: &Path| folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let found: Vec<String> = folders.iter().map(|folder| name(folder)).collect();
        if found.is_empty() {
            return Err(folder("holds no folders: the images of each class belong into a folder of the class's name".to_owned()));
        }
        let classes = classes.map_or_else(|| found.clone(), <[String]>::to_vec);
        let (mut files, mut labels) = (Vec::new(), Vec::new());
        for (class, entry) in found.iter().zip(&folders) {
            let label = classes.iter().position(|known| known == class).ok_or_else(|| {
                let first = classes.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
                folder(format!("{class:?} is none of the {} classes of the model: {first}, ..", classes.len()))
            })?;
            let before = files.len();
            collect(entry, &mut files)?;
            if files.len() == before {
                return Err(folder(format!("the class {class:?} has no image ({})", EXTENSIONS.join(", "))));
            }
            labels.resize(files.len(), label as i64);
        }
        Ok(ImageFolder { files, labels, classes, preprocessing: Arc::new(preprocessing), ahead: Mutex::new(None) })
    }

    /// The class of each image.
    pub fn labels(&self) -> &[i64] {
        &self.labels
    }

    /// Names of classes, by index.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    pub fn preprocessing(&self) -> &ImagePreprocessing {
        &self.preprocessing
    }

    /// The type of all images together.
    pub fn ty(&self) -> TensorType {
        self.preprocessing.ty(self.files.len())
    }

    /// Begins to decode the images at `indices`, which the next call of [`ImageFolder::rows`] takes if it asks for the same ones.
    pub fn prefetch(&self, indices: &[usize]) {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        if ahead.as_ref().is_some_and(|ahead| ahead.indices == indices) {
            return;
        }
        let (files, preprocessing) = (self.chosen(indices), self.preprocessing.clone());
        let decoding = thread::Builder::new().name("images".to_owned()).spawn(move || decode_all(&files, &preprocessing));
        // Without a thread the images are decoded when they are needed.
        *ahead = decoding.ok().map(|decoding| Ahead { indices: indices.to_vec(), decoding });
    }

    /// The images at `indices`, in that order.
    ///
    /// # Errors
    /// An image cannot be read; the error names it.
    pub fn rows(&self, indices: &[usize]) -> Result<Tensor, DataError> {
        let ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner).take();
        let decoded = match ahead.filter(|ahead| ahead.indices == indices).map(|ahead| ahead.decoding.join()) {
            Some(Ok(decoded)) => decoded?,
            // A decoder that panicked does so again, where the image is known.
            Some(Err(_)) | None => decode_all(&self.chosen(indices), &self.preprocessing)?,
        };
        Ok(Tensor::from_bytes(self.preprocessing.ty(indices.len()), decoded)
            .expect("preprocessing gives the elements of its type"))
    }

    fn chosen(&self, indices: &[usize]) -> Vec<PathBuf> {
        indices.iter().filter_map(|&index| self.files.get(index).cloned()).collect()
    }
}

/// The visible entries of a folder, in the order of their names.
fn entries(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    let io = |source| DataError::Io { path: path.to_path_buf(), source };
    let all = fs::read_dir(path).map_err(io)?.map(|entry| entry.map(|e| e.path())).collect::<Result<Vec<_>, _>>().map_err(io)?;
    let hidden = |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    let mut visible: Vec<PathBuf> = all.into_iter().filter(|path| !hidden(path)).collect();
    visible.sort();
    Ok(visible)
}

/// Appends the images below a folder. Links to folders are not followed.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    for path in entries(folder)? {
        if path.is_dir() {
            if !path.is_symlink() {
                collect(&path, files)?;
            }
            continue;
        }
        let extension = path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        match extension.as_str() {
            extension if EXTENSIONS.contains(&extension) => files.push(path),
            extension if UNREADABLE.contains(&extension) => {
                return Err(DataError::Image { path, reason: format!("only {} are read", EXTENSIONS.join(", ")) });
            }
            _ => {}
        }
    }
    Ok(())
}

/// The elements of every image, one after the other.
fn decode_all(files: &[PathBuf], preprocessing: &ImagePreprocessing) -> Result<Vec<u8>, DataError> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let share = files.len().div_ceil(threads).max(1);
    let decode_share = |files: &[PathBuf]| {
        let mut out = Vec::new();
        files.iter().try_for_each(|file| decode(file).map(|image| out.extend(preprocessing.elements(image)))).map(|()| out)
    };
    let parts = thread::scope(|scope| {
        let decoding: Vec<_> = files.chunks(share).map(|files| (files, scope.spawn(move || decode_share(files)))).collect();
        let finished = decoding.into_iter().map(|(files, thread)| {
            let path = || files.first().cloned().unwrap_or_default();
            thread.join().unwrap_or_else(|_| {
                Err(DataError::Image { path: path(), reason: "it, or one after it, breaks the decoder".to_owned() })
            })
        });
        finished.collect::<Result<Vec<_>, _>>()
    })?;
    Ok(parts.concat())
}

/// The pixels of an image in R, G and B; transparency is dropped, and an orientation that a camera noted is not applied.
fn decode(path: &Path) -> Result<Pixels, DataError> {
    let refused = |reason: String| DataError::Image { path: path.to_path_buf(), reason };
    let file = fs::File::open(path).map_err(|source| DataError::Io { path: path.to_path_buf(), source })?;
    let reader = ImageReader::new(BufReader::new(file)).with_guessed_format().map_err(|e| refused(e.to_string()))?;
    let decoder = reader.into_decoder().map_err(|e| refused(e.to_string()))?;
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(refused(format!("it has {width} x {height} pixels, where {MAX_PIXELS} are allowed")));
    }
    let image = DynamicImage::from_decoder(decoder).map_err(|e| refused(e.to_string()))?;
    let (width, height) = (width as usize, height as usize);
    if width == 0 || height == 0 {
        return Err(refused(ErrorKind::UnexpectedEof.to_string()));
    }
    Ok(Pixels { width, height, channels: 3, data: image.into_rgb8().into_raw() })
}
