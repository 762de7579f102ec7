//! Installing packages of the operating system.

use std::fs;

use crate::shell::{Invocation, XtaskError, find_program, heading};

/// Installs a Debian or Ubuntu package, after saying so; elsewhere the error tells what to install.
///
/// `what` is the thing that is missing, `elsewhere` how to get it on other systems.
pub fn install(what: &str, package: &str, elsewhere: &str) -> Result<(), XtaskError> {
    let missing = |remedy: String| XtaskError::Missing { what: what.into(), remedy };
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    if !is_debian_like(&release) || find_program("apt-get").is_none() {
        return Err(missing(elsewhere.into()));
    }
    let prefix: &[&str] = if is_root(&fs::read_to_string("/proc/self/status").unwrap_or_default()) {
        &[]
    } else if find_program("sudo").is_some() {
        &["sudo"]
    } else {
        return Err(missing(format!("install the package {package} as root")));
    };
    let apt_get = |arguments: &[&str]| {
        let words = [prefix, &["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"], arguments].concat();
        Invocation::new(words[0]).arguments(&words[1..])
    };
    let install = || apt_get(&["install", "--yes", "--no-install-recommends", package]);
    heading("install", &format!("{what} is missing: {}", install()));
    if install().run().is_err() {
        // A fresh image has no package lists, or lists that name versions no longer served.
        apt_get(&["update"]).run()?;
        install().run()?;
    }
    Ok(())
}

/// Whether `/etc/os-release` describes Debian, Ubuntu or a derivative.
fn is_debian_like(release: &str) -> bool {
    release
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter(|(key, _)| matches!(*key, "ID" | "ID_LIKE"))
        .flat_map(|(_, value)| value.trim_matches('"').split(' '))
        .any(|id| matches!(id, "debian" | "ubuntu"))
}

/// Whether `/proc/self/status` gives an effective user id of 0.
fn is_root(status: &str) -> bool {
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    ids.and_then(|ids| ids.split_whitespace().nth(1)) == Some("0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debian_ubuntu_and_their_derivatives_use_apt() {
        for release in ["PRETTY_NAME=\"Debian\"\nID=debian\n", "ID=ubuntu\nID_LIKE=debian\n", "ID=pop\nID_LIKE=\"ubuntu debian\""]
        {
            assert!(is_debian_like(release), "{release}");
        }
        for release in ["", "ID=fedora\n", "ID=\"opensuse\"\nID_LIKE=\"suse\"\nHOME_URL=\"debian\"", "NAME=debian"] {
            assert!(!is_debian_like(release), "{release}");
        }
    }

    #[test]
    fn root_is_told_by_the_effective_user_id() {
        assert!(is_root("Name:\txtask\nUid:\t1000\t0\t1000\t1000\nGid:\t0\t0\t0\t0\n"));
        assert!(!is_root("Uid:\t0\t1000\t0\t0\nGid:\t0\t0\t0\t0\n"));
        assert!(!is_root(""));
    }
}
