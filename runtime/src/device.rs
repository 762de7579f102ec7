//! An open adapter, checked and shared by all that runs on it.

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use blade_graphics::{Context, ContextDesc};
use meganeura_codegen::profile::{DeviceProfile, Precision};

use crate::adapter::{self, DeviceInfo};
use crate::fault::{Fault, Faults, Site};
use crate::self_test::{self, Probe};
use crate::session::SessionError;

/// Why a device cannot be opened, or what went wrong on it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    #[error(
        "no Vulkan loader on this machine ({0}): install a Vulkan driver; on Debian and Ubuntu the package mesa-vulkan-drivers holds a software one"
    )]
    NoLoader(String),
    #[error(
        "no Vulkan driver on this machine: install the one of your GPU; on Debian and Ubuntu the package mesa-vulkan-drivers holds a software one"
    )]
    NoDriver,
    #[error("no device matches {selector}; there are: {}", available.join(", "))]
    NotFound { selector: DeviceSelector, available: Vec<String> },
    #[error("{name} cannot be used: {reason}")]
    Unsupported { name: String, reason: String },
    #[error("device {index} ({name}) cannot be told apart from its twin, device {twin}: select {twin}")]
    Twin { index: usize, twin: usize, name: String },
    #[error("the graphics interface does not start: {0}")]
    Unavailable(String),
    #[error("{name} fails the self-test: {} gave wrong results; another driver version may help", probes.join(", "))]
    SelfTest { name: String, probes: Vec<String> },
    #[error("the self-test did not run on {name}: {reason}")]
    SelfTestAborted { name: String, reason: String },
    #[error("{label} needs a buffer of {bytes} bytes; this device permits {limit}")]
    BufferTooLarge { label: String, bytes: u64, limit: u64 },
    #[error("{label} needs {bytes} bytes; this device has {limit}")]
    MemoryExceeded { label: String, bytes: u64, limit: u64 },
    #[error("there is no memory left for {label}, which needs {bytes} bytes")]
    NoRoom { label: String, bytes: u64 },
    #[error("the device is out of memory")]
    OutOfMemory,
    #[error("the device was lost: the driver stopped it")]
    Lost,
    #[error("the graphics library failed: {0}")]
    Failed(String),
    #[error("the device failed earlier: open it again")]
    Dead,
}

impl DeviceError {
    /// Whether a smaller request may do, on this device or on the one that is opened in its place.
    pub fn is_out_of_memory(&self) -> bool {
        use DeviceError::{BufferTooLarge, MemoryExceeded, NoRoom, OutOfMemory};
        matches!(self, BufferTooLarge { .. } | MemoryExceeded { .. } | NoRoom { .. } | OutOfMemory)
    }
}

/// Held while instances of the graphics interface are made and destroyed: some drivers crash where two threads do so at once.
static INSTANCES: Mutex<()> = Mutex::new(());

fn instances() -> MutexGuard<'static, ()> {
    INSTANCES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Which adapter to open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceSelector {
    /// The first of the best kind: discrete, integrated, virtual, software.
    #[default]
    Auto,
    /// Position in [`Device::list`].
    Index(usize),
    /// The first whose name contains this text, in any case.
    Name(String),
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceSelector::Auto => f.write_str("auto"),
            DeviceSelector::Index(index) => write!(f, "{index}"),
            DeviceSelector::Name(name) => write!(f, "{name:?}"),
        }
    }
}

impl std::str::FromStr for DeviceSelector {
    type Err = std::convert::Infallible;

    /// `auto`, a number, or a part of a name.
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Ok(match s.parse() {
            Ok(index) => DeviceSelector::Index(index),
            Err(_) if s.eq_ignore_ascii_case("auto") => DeviceSelector::Auto,
            Err(_) => DeviceSelector::Name(s.into()),
        })
    }
}

/// An open device. All buffers, pipelines and sessions made from it keep it alive.
pub struct Device {
    context: ManuallyDrop<Arc<Context>>,
    info: DeviceInfo,
    precision: Precision,
    /// Of strict precision.
    profile: DeviceProfile,
    /// Of accelerated precision, where the device was opened at that and has what it takes.
    accelerated: OnceLock<DeviceProfile>,
    dead: AtomicBool,
    /// Nothing is on it any more, whatever was submitted.
    lost: AtomicBool,
    /// Something may be on it that cannot be waited for. What it uses is leaked, and the context with it.
    abandoned: AtomicBool,
    faults: Faults,
    probes: OnceLock<Vec<Probe>>,
    memory: MemoryCounters,
}

/// What has been asked of the driver.
#[derive(Debug, Default)]
pub(crate) struct MemoryCounters {
    /// Bytes of device memory in use.
    pub(crate) bytes: AtomicU64,
    /// Buffers that were ever created, staging buffers included.
    pub(crate) buffers: AtomicU64,
}

impl Device {
    /// All adapters of this machine, usable or not.
    pub fn list() -> Result<Vec<DeviceInfo>, DeviceError> {
        let _alone = instances();
        adapter::list()
    }

    /// Opens an adapter and runs the [self-test](self_test) on it.
    pub fn open(selector: &DeviceSelector) -> Result<Arc<Self>, DeviceError> {
        Self::open_at(selector, Precision::Strict)
    }

    /// As [`Device::open`], for programs of some precision: the [profile](Device::profile) offers them what it permits. Whether the matrix
    /// units of the device are right is tried first; where they are not, or there are none, nothing differs from strict precision but
    /// what [`Device::probes`] tells.
    pub fn open_at(selector: &DeviceSelector, precision: Precision) -> Result<Arc<Self>, DeviceError> {
        let (context, info) = {
            let _alone = instances();
            let adapters = adapter::list()?;
            let info = select(&adapters, selector)?;
            let desc = ContextDesc { timing: true, device_id: Some(info.device_id), ..ContextDesc::default() };
            // SAFETY: blade asks that the driver be sound; nothing else is shared with it.
            let context = catch(|| unsafe { Context::init(desc) })?;
            (context.map_err(|e| DeviceError::Unavailable(e.to_string()))?, info.clone())
        };
        Self::checked(Arc::new(context), info, precision)
    }

    /// Shares the context of a host that owns the device, and runs the [self-test](self_test) on it. The host goes on using the context, and
    /// records sessions into its own encoders with [`Session::record`](crate::Session::record).
    pub fn with_context(context: Arc<Context>) -> Result<Arc<Self>, DeviceError> {
        Self::with_context_at(context, Precision::Strict)
    }

    /// As [`Device::with_context`], for programs of some precision.
    pub fn with_context_at(context: Arc<Context>, precision: Precision) -> Result<Arc<Self>, DeviceError> {
        let wanted = context.device_information();
        let adapters = Self::list()?;
        let found = adapters.iter().find(|a| a.name == wanted.device_name && a.driver == wanted.driver_name);
        let info = found.cloned().ok_or_else(|| DeviceError::NotFound {
            selector: DeviceSelector::Name(wanted.device_name.clone()),
            available: names(&adapters),
        })?;
        Self::checked(context, info, precision)
    }

    fn checked(context: Arc<Context>, info: DeviceInfo, precision: Precision) -> Result<Arc<Self>, DeviceError> {
        let device = Arc::new(Device {
            context: ManuallyDrop::new(context),
            precision,
            profile: info.profile(),
            accelerated: OnceLock::new(),
            info,
            dead: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            faults: Faults::default(),
            probes: OnceLock::new(),
            memory: MemoryCounters::default(),
        });
        let name = || device.info.name.clone();
        let aborted = |e: SessionError| DeviceError::SelfTestAborted { name: name(), reason: e.to_string() };
        let mut probes = self_test::run(&device).map_err(aborted)?;
        let wrong: Vec<String> = probes.iter().filter(|p| !p.passed).map(|p| p.name.into()).collect();
        if !wrong.is_empty() {
            return Err(DeviceError::SelfTest { name: name(), probes: wrong });
        }
        if let (Precision::Accelerated, Some(unit)) = (precision, device.info.matrix_unit) {
            let probe = self_test::run_matrix_unit(&device, unit).map_err(aborted)?;
            if probe.passed {
                device.accelerated.get_or_init(|| DeviceProfile { matrix_unit: Some(unit), ..device.profile.clone() });
            }
            probes.push(probe);
        }
        device.probes.get_or_init(|| probes);
        Ok(device)
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// What codegen must respect on this device, and what it may use.
    pub fn profile(&self) -> &DeviceProfile {
        self.accelerated.get().unwrap_or(&self.profile)
    }

    /// The precision of the programs that this device is open for.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The outcome of each probe of the self-test.
    pub fn probes(&self) -> &[Probe] {
        self.probes.get().map_or(&[], Vec::as_slice)
    }

    /// Bytes of device memory that all that lives on this device has asked for, without the staging memory of the host.
    pub fn memory_in_use(&self) -> u64 {
        self.memory.bytes.load(Ordering::Relaxed)
    }

    /// Buffers that were ever created on this device.
    pub fn buffers_created(&self) -> u64 {
        self.memory.buffers.load(Ordering::Relaxed)
    }

    pub(crate) fn counters(&self) -> &MemoryCounters {
        &self.memory
    }

    /// The context, for a host that records its own passes.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether the device was lost or ran out of memory. It must be opened again then.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Makes the call after the next `after` ones at `site` fail as `fault`. For tests.
    #[doc(hidden)]
    pub fn inject(&self, site: Site, after: u32, fault: Fault) {
        self.faults.arm(site, after, fault);
    }

    /// Bytes of device memory that this process uses, and how many it may use, where the driver tells.
    pub fn memory(&self) -> Option<(u64, u64)> {
        let stats = self.guard(Context::memory_stats).ok()?;
        (stats.budget > 0).then_some((stats.usage, stats.budget))
    }

    /// Calls blade. A panic kills the device, since it leaves blade's locks poisoned.
    pub(crate) fn guard<T>(&self, call: impl FnOnce(&Context) -> T) -> Result<T, DeviceError> {
        if self.is_dead() {
            return Err(DeviceError::Dead);
        }
        catch(|| call(&self.context)).inspect_err(|error| self.kill(error))
    }

    /// As [`Device::guard`], for a call that tests make fail.
    pub(crate) fn guard_at<T>(&self, site: Site, call: impl FnOnce(&Context) -> T) -> Result<T, DeviceError> {
        self.guard(|context| {
            self.faults.trip(site);
            call(context)
        })
    }

    /// Calls blade to destroy something, on a dead device too; what a poisoned lock guards is leaked.
    pub(crate) fn release<T>(&self, call: impl FnOnce(&Context) -> T) -> Result<T, DeviceError> {
        if self.abandoned.load(Ordering::Acquire) {
            return Err(DeviceError::Dead);
        }
        catch(|| call(&self.context)).inspect_err(|error| self.kill(error))
    }

    pub(crate) fn kill(&self, cause: &DeviceError) {
        if *cause == DeviceError::Lost {
            self.lost.store(true, Ordering::Release);
        }
        self.dead.store(true, Ordering::Release);
    }

    /// Submitted work cannot be waited for. Unless the device is lost, and the work with it, nothing is destroyed from now on.
    pub(crate) fn abandon(&self) {
        if !self.lost.load(Ordering::Acquire) {
            self.abandoned.store(true, Ordering::Release);
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("info", &self.info).field("dead", &self.dead).finish_non_exhaustive()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.abandoned.load(Ordering::Acquire) {
            return;
        }
        let _alone = instances();
        let dropped = catch(|| {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.context) }
        });
        if let Err(error) = dropped {
            tracing::debug!(%error, "a dead device was not destroyed");
        }
    }
}

fn names(adapters: &[DeviceInfo]) -> Vec<String> {
    adapters.iter().map(|a| format!("{} {}", a.index, a.name)).collect()
}

fn select<'a>(adapters: &'a [DeviceInfo], selector: &DeviceSelector) -> Result<&'a DeviceInfo, DeviceError> {
    let found = match selector {
        DeviceSelector::Auto => adapters.iter().filter(|a| a.unsupported.is_none()).min_by_key(|a| a.kind),
        DeviceSelector::Index(index) => adapters.get(*index),
        DeviceSelector::Name(name) => adapters.iter().find(|a| a.name.to_lowercase().contains(&name.to_lowercase())),
    };
    let info = found.ok_or_else(|| DeviceError::NotFound { selector: selector.clone(), available: names(adapters) })?;
    if let Some(reason) = &info.unsupported {
        return Err(DeviceError::Unsupported { name: info.name.clone(), reason: reason.clone() });
    }
    // blade opens the first usable adapter of a device id.
    let opened = adapters.iter().find(|a| a.device_id == info.device_id && a.unsupported.is_none());
    match opened {
        Some(twin) if twin.index != info.index => {
            Err(DeviceError::Twin { index: info.index, twin: twin.index, name: info.name.clone() })
        }
        _ => Ok(info),
    }
}

/// Turns a panic of blade into an error.
pub(crate) fn catch<T>(call: impl FnOnce() -> T) -> Result<T, DeviceError> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|payload| failure(payload.as_ref()))
}

/// What a panic of blade means. It has no types for these: the text of Vulkan's result codes tells them apart.
fn failure(payload: &(dyn Any + Send)) -> DeviceError {
    let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
    let text = text.unwrap_or("unknown panic");
    const CAUSES: [(&str, DeviceError); 8] = [
        ("OutOfDeviceMemory", DeviceError::OutOfMemory),
        ("OutOfHostMemory", DeviceError::OutOfMemory),
        ("OUT_OF_DEVICE_MEMORY", DeviceError::OutOfMemory),
        ("OUT_OF_HOST_MEMORY", DeviceError::OutOfMemory),
        ("memory allocation has failed", DeviceError::OutOfMemory),
        ("DEVICE_LOST", DeviceError::Lost),
        ("device has been lost", DeviceError::Lost),
        ("GPU has crashed", DeviceError::Lost),
    ];
    let cause = CAUSES.into_iter().find(|(sign, _)| text.contains(sign));
    cause.map_or_else(|| DeviceError::Failed(text.into()), |(_, error)| error)
}

impl From<blade_graphics::DeviceError> for DeviceError {
    fn from(error: blade_graphics::DeviceError) -> Self {
        match error {
            blade_graphics::DeviceError::DeviceLost => DeviceError::Lost,
            blade_graphics::DeviceError::OutOfMemory => DeviceError::OutOfMemory,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::{AdapterKind, Limits};
    use crate::testing::device;

    fn adapter(index: usize, name: &str, kind: AdapterKind, device_id: u32) -> DeviceInfo {
        let limits = Limits {
            storage_bindings: 8,
            storage_binding_bytes: 1 << 27,
            allocation_bytes: 1 << 30,
            memory_bytes: 1 << 32,
            workgroup_bytes: 1 << 14,
            workgroup_invocations: 128,
            workgroup_size: [128; 3],
            workgroups: [65535; 3],
        };
        let (name, driver, driver_info) = (name.into(), String::new(), String::new());
        DeviceInfo {
            index,
            name,
            driver,
            driver_info,
            kind,
            vendor_id: 1,
            device_id,
            limits,
            multiprocessors: None,
            matrix_unit: None,
            unsupported: None,
        }
    }

    #[test]
    fn auto_prefers_a_discrete_gpu() {
        let adapters = [
            adapter(0, "llvmpipe", AdapterKind::Software, 0),
            adapter(1, "Radeon", AdapterKind::Discrete, 7),
            adapter(2, "Iris", AdapterKind::Integrated, 8),
        ];
        assert_eq!(select(&adapters, &DeviceSelector::Auto).map(|a| a.index), Ok(1));
        assert_eq!(select(&adapters, &DeviceSelector::Name("IRIS".into())).map(|a| a.index), Ok(2));
        assert_eq!(select(&adapters, &DeviceSelector::Index(0)).map(|a| a.index), Ok(0));
        let missing = select(&adapters, &DeviceSelector::Name("quadro".into())).unwrap_err();
        assert!(missing.to_string().contains("1 Radeon"), "{missing}");
    }

    #[test]
    fn the_second_of_two_twins_is_refused() {
        let adapters = [adapter(0, "A", AdapterKind::Discrete, 7), adapter(1, "A", AdapterKind::Discrete, 7)];
        let error = select(&adapters, &DeviceSelector::Index(1)).unwrap_err();
        assert_eq!(error, DeviceError::Twin { index: 1, twin: 0, name: "A".into() });
    }

    #[test]
    fn selectors_parse() {
        assert_eq!("auto".parse(), Ok(DeviceSelector::Auto));
        assert_eq!("2".parse(), Ok(DeviceSelector::Index(2)));
        assert_eq!("rtx 4090".parse(), Ok(DeviceSelector::Name("rtx 4090".into())));
    }

    #[test]
    fn an_open_device_meets_vulkans_required_limits() {
        let limits = device().info().limits;
        assert!(limits.storage_bindings >= 4 && limits.storage_binding_bytes >= 1 << 27, "{limits:?}");
        assert!(limits.workgroup_bytes >= 16 << 10 && limits.workgroup_invocations >= 128, "{limits:?}");
        assert!(limits.memory_bytes > 0 && limits.allocation_bytes >= 1 << 30, "{limits:?}");
        let listed = Device::list().unwrap();
        assert_eq!(listed[device().info().index], *device().info());
    }

    #[test]
    fn a_panic_kills_the_device_and_names_its_cause() {
        let context = device().context().clone();
        let other = Device::with_context(context).unwrap();
        let error = other.guard(|_| panic!("Failed: ERROR_DEVICE_LOST")).unwrap_err();
        assert_eq!(error, DeviceError::Lost);
        assert_eq!(other.guard(|_| ()), Err(DeviceError::Dead));
        assert!(!device().is_dead());
    }

    #[cfg(not(any(target_os = "macos", target_os = "ios")))]
    #[test]
    fn the_words_of_result_codes_are_understood() {
        let said = |text: &str| failure(&text.to_string());
        let out = ash::vk::Result::ERROR_OUT_OF_HOST_MEMORY;
        let lost = ash::vk::Result::ERROR_DEVICE_LOST;
        for text in [format!("GPU error {out}"), format!("called `Result::unwrap()` on an `Err` value: {out:?}")] {
            assert_eq!(said(&text), DeviceError::OutOfMemory, "{text}");
        }
        for text in [format!("GPU error {lost}"), format!("{lost:?}"), "GPU has crashed in step".into()] {
            assert_eq!(said(&text), DeviceError::Lost, "{text}");
        }
        assert_eq!(said("index out of bounds"), DeviceError::Failed("index out of bounds".into()));
    }

    #[test]
    fn devices_open_and_close_on_many_threads_at_once() {
        std::thread::scope(|scope| {
            let open = || Device::open(&DeviceSelector::Auto).map(|device| device.info().index);
            let threads: Vec<_> = (0..6).map(|_| scope.spawn(open)).collect();
            let expected = Ok(device().info().index);
            threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), expected));
        });
    }
}
