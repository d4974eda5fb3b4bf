//! Files that may change while the server runs.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

/// How often files are looked at. They are small, and their content is what is compared: a time stamp may stay the same,
/// and a mounted secret changes by its folder's link.
const INTERVAL: Duration = Duration::from_secs(1);

/// The content of some files as it was last seen.
pub struct Watched {
    paths: Vec<PathBuf>,
    seen: Vec<Vec<u8>>,
}

impl Watched {
    /// Begins with what the files hold now; one that can't be read counts as empty.
    pub fn new(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let paths: Vec<_> = paths.into_iter().collect();
        let seen = paths.iter().map(|path| read(path).unwrap_or_default()).collect();
        Self { paths, seen }
    }

    /// Resolves when some file holds something else than when it was last seen. A file that can't be read counts as
    /// unchanged: it is about to be replaced.
    pub async fn changed(&mut self) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            let mut changed = false;
            for (path, seen) in self.paths.iter().zip(&mut self.seen) {
                match read(path) {
                    Ok(now) if now != *seen => {
                        *seen = now;
                        changed = true;
                    }
                    _ => {}
                }
            }
            if changed {
                return;
            }
        }
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    std::fs::read(path)
}
