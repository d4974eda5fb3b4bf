//! The node's name, which marks the leases it gives.

use std::{fs, io, path::Path};

use rand::{Rng, distr::slice::Choose};

/// File in the data folder that keeps a random name over restarts.
const FILE: &str = "node_id";
/// Without vowels no words come out.
const LETTERS: &[u8] = b"bcdfghjkmnpqrstvwxz23456789";
/// 27^8 names: with a thousand nodes the odds that two share one are about one in half a million.
const LETTER_COUNT: usize = 8;

/// The name to use: the one set, or the one kept in the data folder, or a new random one, which is kept there.
///
/// # Errors
/// When the file can't be read or written.
pub fn id(set: &str, data_folder: Option<&Path>) -> io::Result<String> {
    if !set.is_empty() {
        return Ok(set.to_owned());
    }
    let Some(folder) = data_folder else { return Ok(random()) };
    let path = folder.join(FILE);
    match fs::read_to_string(&path) {
        Ok(kept) if is_legal(kept.trim()) => Ok(kept.trim().to_owned()),
        // A crash may have left it empty; any name serves.
        Ok(_) => keep(&path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => keep(&path),
        Err(error) => Err(error),
    }
}

fn is_legal(kept: &str) -> bool {
    kept.len() == LETTER_COUNT && kept.bytes().all(|b| LETTERS.contains(&b))
}

fn keep(path: &Path) -> io::Result<String> {
    let id = random();
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, format!("{id}\n"))?;
    Ok(id)
}

fn random() -> String {
    // LETTERS is not empty, so there is always something to choose from.
    let Ok(letters) = Choose::new(LETTERS) else { return String::new() };
    rand::rng().sample_iter(letters).take(LETTER_COUNT).map(|&letter| char::from(letter)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_random_name_is_kept_in_the_data_folder() {
        let folder = tempfile::tempdir().unwrap();
        let first = id("", Some(folder.path())).unwrap();
        assert!(is_legal(&first), "{first}");
        assert_eq!(id("", Some(folder.path())).unwrap(), first);
        assert_ne!(id("", None).unwrap(), id("", None).unwrap());
    }

    #[test]
    fn a_set_name_wins_and_a_damaged_file_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(id("node-a", Some(folder.path())).unwrap(), "node-a");
        assert!(!folder.path().join(FILE).exists());
        fs::write(folder.path().join(FILE), "\0\0").unwrap();
        let id_now = id("", Some(folder.path())).unwrap();
        assert!(is_legal(&id_now));
        assert_eq!(id("", Some(folder.path())).unwrap(), id_now);
    }
}
