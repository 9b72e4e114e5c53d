//! How much of this machine's memory is free for a run: the system's word, and that of every control group around
//! this process.

use std::path::Path;

/// What can be allocated without pushing anybody else out; `None` where the system does not tell.
pub(crate) fn free_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let group = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let groups = group_free_bytes(&group, Path::new("/sys/fs/cgroup"));
    Some(available_bytes(&meminfo)?.min(groups.unwrap_or(u64::MAX)))
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? << 10)
}

/// The least that a control group leaves, from `/proc/self/cgroup` up to the root at `mount`; version 2, and the memory
/// controller of version 1. `None` without a limit.
fn group_free_bytes(own: &str, mount: &Path) -> Option<u64> {
    let mut least = None;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let (root, limit, usage) = match controllers {
            "" => (mount.to_path_buf(), "memory.max", "memory.current"),
            list if list.split(',').any(|c| c == "memory") => {
                (mount.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        // In a container the path may be that of the host, of which only the root is shown.
        let groups = Path::new(path.trim_start_matches('/')).ancestors().map(|group| root.join(group));
        for group in groups {
            if let Some(free) = free_in(&group, limit, usage) {
                least = Some(least.map_or(free, |l: u64| l.min(free)));
            }
        }
    }
    least
}

/// `max` and the huge number that stands for it in version 1 are no limit.
fn free_in(group: &Path, limit: &str, usage: &str) -> Option<u64> {
    let number = |file: &str| std::fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    let limit = number(limit).filter(|limit| *limit < 1 << 60)?;
    // Cached files are given back when memory is wanted.
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cached = stat.lines().find_map(|l| l.strip_prefix("inactive_file ")).and_then(|n| n.parse::<u64>().ok());
    let used = number(usage).unwrap_or(0).saturating_sub(cached.unwrap_or(0));
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_tightest_group_around_the_process_counts() {
        let mount = tempfile::tempdir().unwrap();
        let group = mount.path().join("user.slice/work");
        fs::create_dir_all(&group).unwrap();
        let write = |folder: &Path, file: &str, text: &str| fs::write(folder.join(file), text).unwrap();
        assert_eq!(group_free_bytes("0::/user.slice/work\n", mount.path()), None);
        write(&group, "memory.max", "max\n");
        assert_eq!(group_free_bytes("0::/user.slice/work\n", mount.path()), None);
        write(&mount.path().join("user.slice"), "memory.max", "1000\n");
        write(&mount.path().join("user.slice"), "memory.current", "600\n");
        write(&mount.path().join("user.slice"), "memory.stat", "anon 1\ninactive_file 100\n");
        assert_eq!(group_free_bytes("0::/user.slice/work\n", mount.path()), Some(500));
        write(&group, "memory.max", "300\n");
        assert_eq!(group_free_bytes("0::/user.slice/work\n", mount.path()), Some(300));
    }

    #[test]
    fn the_older_control_groups_are_understood() {
        let mount = tempfile::tempdir().unwrap();
        let group = mount.path().join("memory/docker/abc");
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("memory.limit_in_bytes"), "9223372036854771712").unwrap();
        let own = "12:pids:/docker/abc\n5:cpu,memory:/docker/abc\n";
        assert_eq!(group_free_bytes(own, mount.path()), None);
        fs::write(group.join("memory.limit_in_bytes"), "2000").unwrap();
        fs::write(group.join("memory.usage_in_bytes"), "2500").unwrap();
        assert_eq!(group_free_bytes(own, mount.path()), Some(0));
    }

    #[test]
    fn this_machine_says_something() {
        assert!(free_bytes().is_some_and(|free| free > 1 << 20));
        assert_eq!(available_bytes("MemTotal: 5 kB\nMemAvailable:   12 kB\n"), Some(12 << 10));
    }
}
