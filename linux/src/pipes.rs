//! Reads several pipes at once, so that the writer of one never waits for the reader of another.
//! (std's function for a child's two outputs panics if read(2) fails.)

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A new pipe: read end and write end, both close-on-exec.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(nix::unistd::pipe2(OFlag::O_CLOEXEC)?)
}

/// Enlarges an empty pipe so that `bytes` fit into it, as far as the kernel allows
/// (`/proc/sys/fs/pipe-max-size`); a new pipe has 64 KiB.
pub fn make_room(pipe: impl AsFd, bytes: usize) {
    const NEW: usize = 64 * 1024;
    if let Some(bytes) = i32::try_from(bytes).ok().filter(|_| bytes > NEW) {
        // If the kernel refuses, the writer waits for the reader.
        let _size = nix::fcntl::fcntl(pipe, nix::fcntl::FcntlArg::F_SETPIPE_SZ(bytes));
    }
}

/// The read ends of `N` pipes, and the bytes read from each.
#[derive(Debug)]
pub struct Pipes<const N: usize> {
    open: Vec<(usize, File)>,
    texts: [Vec<u8>; N],
}

impl<const N: usize> Pipes<N> {
    pub fn new(pipes: [OwnedFd; N]) -> Self {
        let open = pipes.into_iter().map(File::from).enumerate().collect();
        Self { open, texts: [const { Vec::new() }; N] }
    }

    /// Reads until `enough` accepts what was read, or until all writers have closed their pipes.
    pub fn read_until(&mut self, mut enough: impl FnMut(&[Vec<u8>; N]) -> bool) -> io::Result<()> {
        while !self.open.is_empty() && !enough(&self.texts) {
            let mut fds: Vec<PollFd<'_>> =
                self.open.iter().map(|(_, pipe)| PollFd::new(pipe.as_fd(), PollFlags::POLLIN)).collect();
            match poll(&mut fds, PollTimeout::NONE) {
                Err(Errno::EINTR) => continue,
                polled => polled?,
            };
            let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
            for at in (0..ready.len()).rev().filter(|at| ready[*at]) {
                let (number, pipe) = &mut self.open[at];
                if read_some(pipe, &mut self.texts[*number])? == 0 {
                    self.open.remove(at);
                }
            }
        }
        Ok(())
    }

    /// The bytes read so far.
    pub fn texts(&self) -> &[Vec<u8>; N] {
        &self.texts
    }
}

/// Reads at least one byte, or the end.
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
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn shell(script: &str) -> (Child, Pipes<2>) {
        let mut child = Command::new("/bin/sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pipes = Pipes::new([child.stdout.take().unwrap().into(), child.stderr.take().unwrap().into()]);
        (child, pipes)
    }

    #[test]
    fn a_pipe_with_room_takes_all_at_once() {
        let (_from, to) = pipe().unwrap();
        make_room(&to, 300_000);
        nix::fcntl::fcntl(&to, nix::fcntl::FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        assert_eq!(nix::unistd::write(&to, &vec![0; 300_000]).unwrap(), 300_000);
    }

    #[test]
    fn both_outputs_are_read_however_much_comes_on_either() {
        let (mut child, mut pipes) =
            shell("head -c 300000 /dev/zero >&2; head -c 200000 /dev/zero; head -c 100000 /dev/zero >&2");
        pipes.read_until(|_| false).unwrap();
        assert_eq!(pipes.texts().each_ref().map(Vec::len), [200_000, 400_000]);
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn reading_stops_when_there_is_enough_and_goes_on_later() {
        let (mut child, mut pipes) = shell("printf first; read _go; printf ' second'");
        pipes.read_until(|[out, _]| out.len() >= 5).unwrap();
        assert_eq!(pipes.texts()[0], b"first");
        drop(child.stdin.take());
        pipes.read_until(|_| false).unwrap();
        assert_eq!(pipes.texts()[0], b"first second");
        assert!(child.wait().unwrap().success());
    }
}
