//! Files with external data. They lie in the folder of the model, and nothing that a model says leads anywhere else.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::Mmap;

use crate::limits::{Limit, Limits};
use crate::tensor::{TensorError, map_file};

/// The files next to a model, mapped when they are first read.
#[derive(Debug)]
pub(crate) struct ExternalFiles {
    folder: PathBuf,
    limits: Limits,
    maps: Mutex<HashMap<String, Arc<Mmap>>>,
}

impl ExternalFiles {
    pub fn new(folder: PathBuf, limits: Limits) -> Self {
        ExternalFiles { folder, limits, maps: Mutex::default() }
    }

    /// The file that a tensor names as its `location`.
    pub fn map(&self, location: &str) -> Result<Arc<Mmap>, TensorError> {
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = maps.get(location) {
            return Ok(map.clone());
        }
        self.limits.check(Limit::ExternalFiles, maps.len() as u64 + 1)?;
        let parts = parts(location).map_err(|reason| TensorError::Confinement { location: location.to_owned(), reason })?;
        let file = open(&self.folder, &parts).map_err(|refusal| match refusal {
            Refusal::Confinement(reason) => TensorError::Confinement { location: location.to_owned(), reason },
            Refusal::Io(source) => TensorError::Io { path: self.folder.join(location), source },
        })?;
        let io = |source| TensorError::Io { path: self.folder.join(location), source };
        self.limits.check(Limit::ExternalBytes, file.metadata().map_err(io)?.len())?;
        let map = Arc::new(map_file(&file).map_err(io)?);
        maps.insert(location.to_owned(), map.clone());
        Ok(map)
    }
}

/// Why a file is not opened.
enum Refusal {
    Confinement(&'static str),
    Io(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(source: io::Error) -> Self {
        Refusal::Io(source)
    }
}

const OUTSIDE: &str = "it must stay in the model's folder";
const LINK: &str = "it is reached through a symbolic link; put the file itself into the model's folder";
const HARD_LINK: &str = "the file has other names too (hard links); copy it into the model's folder";
const IRREGULAR: &str = "it is no regular file";

/// The folders and the file of a relative path.
fn parts(location: &str) -> Result<Vec<&str>, &'static str> {
    if location.is_empty() {
        return Err("it has no name");
    }
    if location.contains('\\') {
        return Err("its path is written with backslashes");
    }
    if location.contains('\0') || cfg!(windows) && location.contains(':') {
        return Err("its name holds characters that file names cannot have");
    }
    if location.starts_with('/') || location.split('/').any(|part| part == "..") {
        return Err(OUTSIDE);
    }
    let parts: Vec<&str> = location.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.is_empty() { Err(IRREGULAR) } else { Ok(parts) }
}

/// Opens the file step by step from the folder, each step without following a link, and judges what was opened rather than its
/// path: who swaps a file for a link meanwhile gains nothing.
#[cfg(unix)]
fn open(folder: &Path, parts: &[&str]) -> Result<File, Refusal> {
    use std::os::unix::fs::MetadataExt;

    use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, openat, statat};

    let io = |errno: rustix::io::Errno| Refusal::Io(errno.into());
    let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = openat(CWD, folder, directory, Mode::empty()).map_err(io)?;
    for (index, part) in parts.iter().enumerate() {
        let is_last = index + 1 == parts.len();
        // Opening a device can have effects, and opening a pipe can block: only what looks right is opened.
        let kind = FileType::from_raw_mode(statat(&at, *part, AtFlags::SYMLINK_NOFOLLOW).map_err(io)?.st_mode);
        match kind {
            FileType::Symlink => return Err(Refusal::Confinement(LINK)),
            FileType::RegularFile if is_last => {}
            FileType::Directory if !is_last => {}
            _ => return Err(Refusal::Confinement(IRREGULAR)),
        }
        let flags = if is_last { OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC } else { directory };
        at = openat(&at, *part, flags | OFlags::NOFOLLOW, Mode::empty()).map_err(io)?;
    }
    let file = File::from(at);
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(Refusal::Confinement(IRREGULAR));
    }
    if metadata.nlink() > 1 {
        return Err(Refusal::Confinement(HARD_LINK));
    }
    Ok(file)
}

#[cfg(not(unix))]
fn open(folder: &Path, parts: &[&str]) -> Result<File, Refusal> {
    let mut path = folder.to_path_buf();
    for part in parts {
        path.push(part);
        if std::fs::symlink_metadata(&path)?.is_symlink() {
            return Err(Refusal::Confinement(LINK));
        }
    }
    let file = File::open(&path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(Refusal::Confinement(IRREGULAR)) }
}
