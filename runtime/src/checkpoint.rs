//! Files that are whole or absent, whatever happens while they are written.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::Builder;

/// Ends the names of files being written; they begin with a dot. A killed process leaves its own behind.
const PARTIAL: &str = ".partial";

/// Why a file could not be written. What was there before is untouched.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct CheckpointError {
    /// What was being done, as in "write".
    pub action: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

/// Writes a file through `write`, replacing what is at `path` in one step.
///
/// The bytes go to a temporary file in the same folder, which is flushed to the disk and renamed; then the folder is flushed. A
/// crash leaves the old file or the new one. On an error the temporary file is removed. A symbolic link is followed.
pub fn atomic_write(path: impl AsRef<Path>, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<(), CheckpointError> {
    let path = path.as_ref();
    let failed = |action| move |source| CheckpointError { action, path: path.into(), source };
    let target = if path.is_symlink() { fs::canonicalize(path).map_err(failed("follow"))? } else { path.to_path_buf() };
    let name =
        target.file_name().ok_or_else(|| failed("write")(io::Error::new(io::ErrorKind::InvalidInput, "not a file name")))?;
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let prefix = format!(".{}.", name.to_string_lossy());
    let mut builder = Builder::new();
    builder.prefix(&prefix).suffix(PARTIAL);
    // The default is private to the user; what is saved obeys the umask as any other file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut temporary = builder.tempfile_in(folder).map_err(failed("write"))?;
    let file = temporary.as_file_mut();
    write(file).and_then(|()| file.flush()).and_then(|()| file.sync_all()).map_err(failed("write"))?;
    temporary.persist(&target).map_err(|e| failed("replace")(e.error))?;
    sync_folder(folder).map_err(failed("flush the folder of"))
}

/// Makes the rename itself durable.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// Removes what killed processes left half-written in `folder`, and returns how many files that were.
pub fn remove_partial_files(folder: impl AsRef<Path>) -> Result<usize, CheckpointError> {
    let folder = folder.as_ref();
    let failed = |source| CheckpointError { action: "clean", path: folder.into(), source };
    let mut removed = 0;
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') && name.ends_with(PARTIAL) {
            fs::remove_file(entry.path()).map_err(failed)?;
            removed += 1;
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_write_replaces_the_file_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.safetensors");
        for text in ["old", "newer and longer", "short"] {
            atomic_write(&path, |file| file.write_all(text.as_bytes())).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(entries(folder.path()), ["weights.safetensors"]);
    }

    #[test]
    fn a_failed_write_keeps_the_old_file_and_names_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.safetensors");
        atomic_write(&path, |file| file.write_all(b"old")).unwrap();
        let error = atomic_write(&path, |file| {
            file.write_all(b"half of the ne")?;
            Err(io::Error::new(io::ErrorKind::StorageFull, "disk full"))
        })
        .unwrap_err();
        assert_eq!(error.to_string(), format!("cannot write {}: disk full", path.display()));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(entries(folder.path()), ["weights.safetensors"]);
    }

    #[test]
    fn a_panic_while_writing_keeps_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w");
        atomic_write(&path, |file| file.write_all(b"old")).unwrap();
        let unwound = std::panic::catch_unwind(|| atomic_write(&path, |_| panic!("while writing")));
        assert!(unwound.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(entries(folder.path()), ["w"]);
    }

    #[test]
    fn impossible_targets_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("no/such/folder/w");
        assert!(atomic_write(&missing, |_| Ok(())).unwrap_err().to_string().contains("no/such/folder/w"));
        assert_eq!(atomic_write(folder.path(), |_| Ok(())).unwrap_err().action, "replace");
        assert!(atomic_write("/", |_| Ok(())).is_err());
        assert_eq!(entries(folder.path()).len(), 0);
    }

    #[cfg(unix)]
    #[test]
    fn a_symbolic_link_stays_one() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        atomic_write(&link, |file| file.write_all(b"new")).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
    }

    #[test]
    fn leftovers_of_killed_processes_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        for name in [".w.a1b2.partial", "w", "notes.partial", ".hidden"] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        assert_eq!(remove_partial_files(folder.path()).unwrap(), 1);
        assert_eq!(entries(folder.path()), [".hidden", "notes.partial", "w"]);
    }
}
