//! Several pipes read to their ends at once, so that whoever fills one never
//! waits for the reader of another. (std's own way for a child's two outputs
//! panics when read(2) fails.)

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// What comes out of each of `pipes` until its last writer closes it.
pub fn read_to_ends<const N: usize>(pipes: [OwnedFd; N]) -> io::Result<[Vec<u8>; N]> {
    let mut texts = [const { Vec::new() }; N];
    let mut open: Vec<(usize, File)> = pipes.into_iter().map(File::from).enumerate().collect();
    while !open.is_empty() {
        let mut fds: Vec<PollFd<'_>> =
            open.iter().map(|(_, pipe)| PollFd::new(pipe.as_fd(), PollFlags::POLLIN)).collect();
        match poll(&mut fds, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            polled => polled?,
        };
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        for at in (0..ready.len()).rev().filter(|at| ready[*at]) {
            let (number, pipe) = &mut open[at];
            if read_some(pipe, &mut texts[*number])? == 0 {
                open.remove(at);
            }
        }
    }
    Ok(texts)
}

/// At least one byte, or the end.
fn read_some(pipe: &mut File, text: &mut Vec<u8>) -> io::Result<usize> {
    let mut chunk = [0; 4096];
    loop {
        match pipe.read(&mut chunk) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            read => {
                let length = read?;
                text.extend(chunk.iter().take(length));
                return Ok(length);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn both_outputs_are_read_however_much_comes_on_either() {
        let script = "head -c 300000 /dev/zero >&2; head -c 200000 /dev/zero; head -c 100000 /dev/zero >&2";
        let mut child = Command::new("/bin/sh")
            .args(["-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pipes = [child.stdout.take().unwrap().into(), child.stderr.take().unwrap().into()];
        let [out, err] = read_to_ends(pipes).unwrap();
        assert_eq!((out.len(), err.len()), (200_000, 400_000));
        assert!(child.wait().unwrap().success());
    }
}
