//! Pass target, profile and commit of the build to the compiler, for `build_info`.

use std::process::Command;

fn main() {
    let env = |name: &str| std::env::var(name).unwrap_or_default();
    println!("cargo::rustc-env=BUILD_TARGET={}", env("TARGET"));
    println!("cargo::rustc-env=BUILD_PROFILE={}", env("PROFILE"));
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    // Empty if the sources are not a git checkout, such as an unpacked sdist.
    println!("cargo::rustc-env=BUILD_COMMIT={}", git(&["rev-parse", "HEAD"]).unwrap_or_default());
    println!("cargo::rerun-if-changed=build.rs");
    if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
}
