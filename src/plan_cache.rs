//! Compiled programs on disk, so that a second start compiles nothing.
//!
//! A file holds one plan and is named by its [`PlanKey`]. Files are written whole or not at all, and what is damaged or foreign is compiled
//! and written again. A cache that cannot be read or written makes starts slow and nothing else.

use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Instant, SystemTime};

use meganeura_codegen::{
    CompileError, CompileOptions, Compiled, DeviceProfile, PlanKey, compile as compile_anew, from_bytes, to_bytes,
};
use meganeura_ir::Verified;
use meganeura_runtime::{CheckpointError, atomic_write};

/// Bytes of all plans of a cache; beyond, those go first that have not been used for longest.
const MAX_BYTES: u64 = 512 << 20;
/// Bytes of constants of a plan that is kept.
const MAX_CONSTANT_BYTES: u64 = 64 << 20;
const EXTENSION: &str = "plan";

/// Where the environment names the folder, or `off`.
pub const CACHE_VARIABLE: &str = "MEGANEURA_CACHE";

/// Where the process keeps plans.
static CURRENT: RwLock<Option<Arc<PlanCache>>> = RwLock::new(None);

/// A folder of compiled programs. Any number of processes may use it at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanCache {
    folder: PathBuf,
    max_bytes: u64,
}

/// Where a program came from.
#[derive(Debug)]
pub enum PlanSource {
    /// It was read from the cache: nothing was saturated, scheduled or emitted.
    Cache,
    /// It was compiled, and is in the cache now.
    Compiler,
    /// It was compiled, and the next start will compile it again.
    NotKept(NotKept),
}

/// Why a program is not in the cache.
#[derive(Debug, thiserror::Error)]
pub enum NotKept {
    #[error("there is no plan cache")]
    Off,
    #[error("its constants take {bytes} bytes, more than the {MAX_CONSTANT_BYTES} that are kept")]
    Large { bytes: u64 },
    #[error(transparent)]
    Encode(#[from] meganeura_codegen::StoredError),
    #[error("the plan cache {path} cannot be used: {source}", path = .path.display())]
    Folder { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    File(#[from] CheckpointError),
}

/// A compiled program and where it came from.
#[derive(Debug)]
pub struct Planned {
    pub compiled: Compiled,
    pub source: PlanSource,
}

impl PlanCache {
    /// A cache in `folder`, which is made when there is something to keep.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        PlanCache { folder: folder.into(), max_bytes: MAX_BYTES }
    }

    /// The user's cache: the folder in [`CACHE_VARIABLE`], else `meganeura` in `$XDG_CACHE_HOME`, else `~/.cache/meganeura`. `None` where the
    /// variable says `off`, or the user has no home.
    pub fn of_user() -> Option<Self> {
        Self::of_environment(|name| env::var_os(name).map(PathBuf::from).filter(|value| !value.as_os_str().is_empty()))
    }

    fn of_environment(get: impl Fn(&str) -> Option<PathBuf>) -> Option<Self> {
        if let Some(chosen) = get(CACHE_VARIABLE) {
            return (chosen != Path::new("off")).then(|| PlanCache::new(chosen));
        }
        let base = get("XDG_CACHE_HOME").filter(|path| path.is_absolute()).or_else(|| Some(get("HOME")?.join(".cache")));
        base.map(|base| PlanCache::new(base.join("meganeura")))
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The program of a graph: from the cache where it is there, else compiled and kept.
    pub fn compile(&self, graph: &Verified, profile: &DeviceProfile, options: &CompileOptions) -> Result<Planned, CompileError> {
        let started = Instant::now();
        let key = PlanKey::new(graph, profile, options);
        let path = self.folder.join(key.to_string()).with_extension(EXTENSION);
        if let Some(mut compiled) = fs::read(&path).ok().and_then(|bytes| from_bytes(&bytes, &key, graph).ok()) {
            compiled.stages = vec![("read", started.elapsed())];
            // Whoever may not write here may not say what was used last either.
            let _ = File::options().append(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
            return Ok(Planned { compiled, source: PlanSource::Cache });
        }
        let compiled = compile_anew(graph, profile, options)?;
        let source = match self.keep(&compiled, &key, &path) {
            Ok(()) => PlanSource::Compiler,
            Err(reason) => PlanSource::NotKept(reason),
        };
        Ok(Planned { compiled, source })
    }

    fn keep(&self, compiled: &Compiled, key: &PlanKey, path: &Path) -> Result<(), NotKept> {
        let bytes = compiled.program.constants.iter().map(|constant| 4 * constant.words.len() as u64).sum();
        if bytes > MAX_CONSTANT_BYTES {
            return Err(NotKept::Large { bytes });
        }
        let bytes = to_bytes(compiled, key)?;
        fs::create_dir_all(&self.folder).map_err(|source| NotKept::Folder { path: self.folder.clone(), source })?;
        atomic_write(path, |file| file.write_all(&bytes))?;
        self.bound().map_err(|source| NotKept::Folder { path: self.folder.clone(), source })
    }

    /// Removes the plans that have not been used for longest until the rest is within bounds.
    fn bound(&self) -> std::io::Result<()> {
        let mut plans: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let is_plan = path.extension().is_some_and(|extension| extension == EXTENSION);
            // Another process may have removed it meanwhile.
            if let (true, Ok(metadata)) = (is_plan, path.metadata()) {
                plans.push((metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), metadata.len(), path));
            }
        }
        plans.sort();
        let mut total: u64 = plans.iter().map(|plan| plan.1).sum();
        for (_, bytes, path) in plans {
            if total <= self.max_bytes {
                break;
            }
            match fs::remove_file(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => total -= bytes,
            }
        }
        Ok(())
    }
}

/// How a user chooses a cache: a folder, or `off`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanCacheChoice(pub Option<PlanCache>);

impl FromStr for PlanCacheChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "" => Err("write a folder, or off"),
            "off" => Ok(PlanCacheChoice(None)),
            folder => Ok(PlanCacheChoice(Some(PlanCache::new(folder)))),
        }
    }
}

/// Makes all models of this process keep their programs in `cache` from now on, or nowhere, as at first.
pub fn use_plan_cache(cache: Option<PlanCache>) {
    *CURRENT.write().unwrap_or_else(PoisonError::into_inner) = cache.map(Arc::new);
}

/// The program of a graph: from the process's cache where there is one.
///
/// # Errors
/// The graph has no program for such a device.
pub fn compile(graph: &Verified, profile: &DeviceProfile, options: &CompileOptions) -> Result<Planned, CompileError> {
    let cache = CURRENT.read().unwrap_or_else(PoisonError::into_inner).clone();
    match cache {
        Some(cache) => cache.compile(graph, profile, options),
        None => {
            let compiled = compile_anew(graph, profile, options)?;
            Ok(Planned { compiled, source: PlanSource::NotKept(NotKept::Off) })
        }
    }
}

impl std::fmt::Display for PlanSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PlanSource::Cache => f.write_str("from the plan cache"),
            PlanSource::Compiler => f.write_str("compiled, and kept"),
            PlanSource::NotKept(reason) => write!(f, "compiled, and not kept: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use meganeura_ir::{DType, Graph, TensorType, UnaryOp};

    use super::*;

    type TestResult = Result<(), Box<dyn std::error::Error>>;

    fn graph(op: UnaryOp) -> Result<Verified, Box<dyn std::error::Error>> {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [4, 3]))?;
        let y = g.unary(op, x)?;
        g.output("y", y)?;
        Ok(g.verify()?)
    }

    fn plans(cache: &PlanCache) -> std::io::Result<Vec<PathBuf>> {
        fs::read_dir(&cache.folder)?.map(|entry| Ok(entry?.path())).collect()
    }

    #[test]
    fn a_second_start_compiles_nothing_and_gets_the_same() -> TestResult {
        let folder = tempfile::tempdir()?;
        let cache = PlanCache::new(folder.path().join("made/when/needed"));
        let (profile, options) = (DeviceProfile::generic(), CompileOptions::default());
        let first = cache.compile(&graph(UnaryOp::Exp)?, &profile, &options)?;
        assert!(matches!(first.source, PlanSource::Compiler));
        assert!(first.compiled.stages.iter().any(|(stage, _)| *stage == "saturate"));
        let second = cache.compile(&graph(UnaryOp::Exp)?, &profile, &options)?;
        assert!(matches!(second.source, PlanSource::Cache));
        assert_eq!(second.compiled.stages.iter().map(|stage| stage.0).collect::<Vec<_>>(), ["read"]);
        assert_eq!((second.compiled.program, second.compiled.report), (first.compiled.program, first.compiled.report));
        let others = [
            cache.compile(&graph(UnaryOp::Log)?, &profile, &options)?,
            cache.compile(&graph(UnaryOp::Exp)?, &DeviceProfile::software(), &options)?,
            cache.compile(&graph(UnaryOp::Exp)?, &profile, &CompileOptions { saturate: None, ..options.clone() })?,
        ];
        assert!(others.iter().all(|other| matches!(other.source, PlanSource::Compiler)));
        assert_eq!(plans(&cache)?.len(), 4);
        Ok(())
    }

    #[test]
    fn a_damaged_file_is_compiled_and_written_again() -> TestResult {
        let folder = tempfile::tempdir()?;
        let cache = PlanCache::new(folder.path());
        let (profile, options) = (DeviceProfile::generic(), CompileOptions::default());
        let graph = graph(UnaryOp::Exp)?;
        let program = cache.compile(&graph, &profile, &options)?.compiled.program;
        let path = plans(&cache)?.remove(0);
        let whole = fs::read(&path)?;
        let mut changed = whole.clone();
        changed[whole.len() - 9] ^= 1;
        for damaged in [&[][..], &whole[..whole.len() / 2], &changed, b"something else"] {
            fs::write(&path, damaged)?;
            let again = cache.compile(&graph, &profile, &options)?;
            assert!(matches!(again.source, PlanSource::Compiler));
            assert_eq!((&again.compiled.program, fs::read(&path)?), (&program, whole.clone()));
        }
        Ok(())
    }

    #[test]
    fn what_was_used_last_stays() -> TestResult {
        let folder = tempfile::tempdir()?;
        let mut cache = PlanCache::new(folder.path());
        let (profile, options) = (DeviceProfile::generic(), CompileOptions::default());
        let compile = |cache: &PlanCache, op| -> Result<_, Box<dyn std::error::Error>> {
            Ok(matches!(cache.compile(&graph(op)?, &profile, &options)?.source, PlanSource::Cache))
        };
        for op in [UnaryOp::Exp, UnaryOp::Log] {
            compile(&cache, op)?;
        }
        let past = SystemTime::now() - std::time::Duration::from_secs(60);
        for plan in plans(&cache)? {
            File::options().append(true).open(plan)?.set_modified(past)?;
        }
        assert!(compile(&cache, UnaryOp::Exp)?);
        let sizes: u64 = plans(&cache)?.iter().map(|path| path.metadata().map_or(0, |m| m.len())).sum();
        cache.max_bytes = sizes + 256;
        compile(&cache, UnaryOp::Neg)?;
        assert!(compile(&cache, UnaryOp::Exp)? && compile(&cache, UnaryOp::Neg)? && !compile(&cache, UnaryOp::Log)?);
        Ok(())
    }

    #[test]
    fn many_at_once_get_the_same() -> TestResult {
        let folder = tempfile::tempdir()?;
        let cache = PlanCache::new(folder.path());
        let graph = graph(UnaryOp::Exp)?;
        let compile = || cache.compile(&graph, &DeviceProfile::generic(), &CompileOptions::default());
        let programs: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(compile)).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        assert_eq!(programs.len(), 8);
        let expected = compile()?.compiled.program;
        for planned in programs {
            let planned = planned?;
            assert!(planned.compiled.program == expected && !matches!(planned.source, PlanSource::NotKept(_)));
        }
        assert_eq!(plans(&cache)?.len(), 1);
        Ok(())
    }

    #[test]
    fn a_folder_that_cannot_be_made_costs_only_time() -> TestResult {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("file"), "")?;
        let cache = PlanCache::new(folder.path().join("file"));
        let planned = cache.compile(&graph(UnaryOp::Exp)?, &DeviceProfile::generic(), &CompileOptions::default())?;
        assert!(matches!(planned.source, PlanSource::NotKept(NotKept::Folder { .. })));
        Ok(())
    }

    #[test]
    fn the_environment_names_the_folder() {
        let with = |variables: &[(&str, &str)]| {
            let get = |name: &str| variables.iter().find(|v| v.0 == name).map(|v| PathBuf::from(v.1));
            PlanCache::of_environment(get).map(|cache| cache.folder)
        };
        let home = ("HOME", "/home/me");
        assert_eq!(with(&[home]), Some("/home/me/.cache/meganeura".into()));
        assert_eq!(with(&[home, ("XDG_CACHE_HOME", "/cache")]), Some("/cache/meganeura".into()));
        assert_eq!(with(&[home, ("XDG_CACHE_HOME", "relative")]), Some("/home/me/.cache/meganeura".into()));
        assert_eq!(with(&[home, (CACHE_VARIABLE, "/plans")]), Some("/plans".into()));
        assert_eq!(with(&[home, (CACHE_VARIABLE, "off")]), None);
        assert_eq!(with(&[]), None);
    }
}
