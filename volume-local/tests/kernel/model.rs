//! Random operations, each compared with a model in memory, while daemons are killed and their successors
//! too, at each step of the takeover. In the end the directory of the volume is compared as well.
//!
//! `HAWSER_MODEL_SEED=<number>` repeats the operations of an earlier run.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::XattrFlags;
use tests::random::Random;

use crate::cuts::{SETUP, Tracer};
use crate::fixture::{Volume, here};

const SEED: &str = "HAWSER_MODEL_SEED";
const TIMEOUT: Duration = Duration::from_secs(60);
const TOP: [&str; 4] = ["a", "b", "c", "d"];
const BELOW: [&str; 3] = ["x", "y", "z"];
const LONGEST: u64 = 20_000;

type Id = u64;

/// What is at a name.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Inode {
    Directory,
    File { content: Vec<u8>, attribute: Option<Vec<u8>> },
}

/// Names of one or two components.
#[derive(Debug, Default)]
struct Model {
    names: BTreeMap<String, Id>,
    inodes: BTreeMap<Id, Inode>,
    next: Id,
}

type Expected<T> = Result<T, i32>;

impl Model {
    fn inode(&self, name: &str) -> Expected<&Inode> {
        self.parent(name)?;
        self.names.get(name).map(|id| &self.inodes[id]).ok_or(libc::ENOENT)
    }

    /// Errors of the directory that the name is in.
    fn parent(&self, name: &str) -> Expected<()> {
        let Some((parent, _)) = name.split_once('/') else { return Ok(()) };
        match self.names.get(parent).map(|id| &self.inodes[id]) {
            Some(Inode::Directory) => Ok(()),
            Some(Inode::File { .. }) => Err(libc::ENOTDIR),
            None => Err(libc::ENOENT),
        }
    }

    fn is_empty(&self, name: &str) -> bool {
        !self.names.keys().any(|other| other.starts_with(&format!("{name}/")))
    }

    fn make(&mut self, name: &str, inode: Inode) -> Expected<()> {
        self.parent(name)?;
        if self.names.contains_key(name) {
            return Err(libc::EEXIST);
        }
        self.next += 1;
        self.inodes.insert(self.next, inode);
        self.names.insert(name.to_owned(), self.next);
        Ok(())
    }

    fn file(&mut self, name: &str) -> Expected<(&mut Vec<u8>, &mut Option<Vec<u8>>)> {
        self.parent(name)?;
        let id = *self.names.get(name).ok_or(libc::ENOENT)?;
        match self.inodes.get_mut(&id) {
            Some(Inode::File { content, attribute }) => Ok((content, attribute)),
            _ => Err(libc::EISDIR),
        }
    }

    fn unlink(&mut self, name: &str) -> Expected<()> {
        match self.inode(name)? {
            Inode::Directory => return Err(libc::EISDIR),
            Inode::File { .. } => {}
        }
        self.names.remove(name);
        Ok(())
    }

    fn rmdir(&mut self, name: &str) -> Expected<()> {
        match self.inode(name)? {
            Inode::File { .. } => return Err(libc::ENOTDIR),
            Inode::Directory if !self.is_empty(name) => return Err(libc::ENOTEMPTY),
            Inode::Directory => {}
        }
        self.names.remove(name);
        Ok(())
    }

    fn link(&mut self, from: &str, to: &str) -> Expected<()> {
        let is_directory = *self.inode(from)? == Inode::Directory;
        self.parent(to)?;
        if self.names.contains_key(to) {
            return Err(libc::EEXIST);
        }
        if is_directory {
            return Err(libc::EPERM);
        }
        let id = self.names[from];
        self.names.insert(to.to_owned(), id);
        Ok(())
    }

    /// Both names have as many components.
    fn rename(&mut self, from: &str, to: &str) -> Expected<()> {
        self.parent(from)?;
        self.parent(to)?;
        let moved = self.inode(from)?.clone();
        let id = self.names[from];
        match self.names.get(to).map(|id| (*id, &self.inodes[id])) {
            Some((other, _)) if other == id => return Ok(()),
            Some((_, Inode::Directory)) if moved != Inode::Directory => return Err(libc::EISDIR),
            Some((_, Inode::File { .. })) if moved == Inode::Directory => return Err(libc::ENOTDIR),
            Some((_, Inode::Directory)) if !self.is_empty(to) => return Err(libc::ENOTEMPTY),
            _ => {}
        }
        let below: Vec<String> =
            self.names.keys().filter(|name| name.starts_with(&format!("{from}/"))).cloned().collect();
        for name in below {
            let id = self.names.remove(&name).expect("it was found");
            self.names.insert(name.replacen(from, to, 1), id);
        }
        self.names.remove(from);
        self.names.insert(to.to_owned(), id);
        Ok(())
    }

    /// As the file system has it.
    fn assert_is(&self, dir: &Path) {
        let mut found = BTreeMap::new();
        let mut directories = vec![(dir.to_owned(), String::new())];
        while let Some((dir, prefix)) = directories.pop() {
            for entry in fs::read_dir(dir).unwrap() {
                let entry = entry.unwrap();
                let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
                if entry.file_type().unwrap().is_dir() {
                    directories.push((entry.path(), format!("{name}/")));
                    found.insert(name, None);
                } else {
                    found.insert(name, Some(fs::read(entry.path()).unwrap()));
                }
            }
        }
        let content = |id: &Id| match &self.inodes[id] {
            Inode::Directory => None,
            Inode::File { content, .. } => Some(content.clone()),
        };
        let model: BTreeMap<_, _> = self.names.iter().map(|(name, id)| (name.clone(), content(id))).collect();
        assert_eq!(found, model);
    }
}

/// One user of a directory, which compares each answer.
struct User {
    dir: PathBuf,
    model: Model,
    random: Random,
}

impl User {
    fn name(&mut self) -> String {
        let top = *self.random.pick(&TOP);
        if self.random.below(2) == 0 { top.to_owned() } else { format!("{top}/{}", self.random.pick(&BELOW)) }
    }

    fn two_names(&mut self) -> (String, String) {
        let from = self.name();
        loop {
            let to = self.name();
            if to.contains('/') == from.contains('/') {
                return (from, to);
            }
        }
    }

    fn step(&mut self) {
        match self.random.below(11) {
            0 => self.create(),
            1 => self.write(),
            2 => self.append(),
            3 => self.truncate(),
            4 => self.read(),
            5 => self.set_attribute(),
            6 => self.attribute(),
            7 => self.make_or_remove_directory(),
            8 => {
                let name = self.name();
                let done = fs::remove_file(self.dir.join(&name));
                assert_same("unlink", &name, done, self.model.unlink(&name));
            }
            9 => {
                let (from, to) = self.two_names();
                let done = fs::rename(self.dir.join(&from), self.dir.join(&to));
                assert_same("rename", &format!("{from} {to}"), done, self.model.rename(&from, &to));
            }
            _ => {
                let (from, to) = self.two_names();
                let done = fs::hard_link(self.dir.join(&from), self.dir.join(&to));
                assert_same("link", &format!("{from} {to}"), done, self.model.link(&from, &to));
            }
        }
    }

    fn create(&mut self) {
        let name = self.name();
        let done = fs::File::create_new(self.dir.join(&name)).map(drop);
        let inode = Inode::File { content: Vec::new(), attribute: None };
        assert_same("create", &name, done, self.model.make(&name, inode));
    }

    fn write(&mut self) {
        let (name, at) = (self.name(), self.random.below(LONGEST));
        let length = usize::try_from(self.random.below(LONGEST)).unwrap();
        let bytes = self.random.bytes(length);
        let file = OpenOptions::new().write(true).open(self.dir.join(&name));
        let done = file.and_then(|file| file.write_all_at(&bytes, at));
        let expected = self.model.file(&name).map(|(content, _)| {
            let (at, end) = (usize::try_from(at).unwrap(), usize::try_from(at).unwrap() + length);
            if length > 0 && content.len() < end {
                content.resize(end, 0);
            }
            if length > 0 {
                content[at..end].copy_from_slice(&bytes);
            }
        });
        assert_same("write", &name, done, expected);
    }

    fn append(&mut self) {
        let name = self.name();
        let bytes = self.random.bytes(100);
        let file = OpenOptions::new().append(true).open(self.dir.join(&name));
        let done = file.and_then(|mut file| file.write_all(&bytes));
        let expected = self.model.file(&name).map(|(content, _)| content.extend(&bytes));
        assert_same("append", &name, done, expected);
    }

    fn truncate(&mut self) {
        let (name, length) = (self.name(), self.random.below(LONGEST));
        let file = OpenOptions::new().write(true).open(self.dir.join(&name));
        let done = file.and_then(|file| file.set_len(length));
        let expected = self.model.file(&name).map(|(content, _)| {
            content.resize(usize::try_from(length).unwrap(), 0);
        });
        assert_same("truncate", &name, done, expected);
    }

    fn read(&mut self) {
        let name = self.name();
        let found = fs::read(self.dir.join(&name));
        let expected = self.model.file(&name).map(|(content, _)| content.clone());
        assert_same("read", &name, found, expected);
    }

    fn set_attribute(&mut self) {
        let name = self.name();
        let value = self.random.bytes(30);
        let path = self.dir.join(&name);
        if self.model.file(&name) == Err(libc::EISDIR) {
            return;
        }
        let done = rustix::fs::setxattr(&path, "user.key", &value, XattrFlags::empty());
        let expected = self.model.file(&name).map(|(_, attribute)| *attribute = Some(value));
        assert_same("setxattr", &name, done.map_err(io::Error::from), expected);
    }

    fn attribute(&mut self) {
        let name = self.name();
        if self.model.file(&name) == Err(libc::EISDIR) {
            return;
        }
        let mut value = [0; 100];
        let found = rustix::fs::getxattr(self.dir.join(&name), "user.key", &mut value[..]);
        let found = found.map(|length| value[..length].to_vec()).map_err(io::Error::from);
        let expected =
            self.model.file(&name).and_then(|(_, attribute)| attribute.clone().ok_or(libc::ENODATA));
        assert_same("getxattr", &name, found, expected);
    }

    fn make_or_remove_directory(&mut self) {
        let name = (*self.random.pick(&TOP)).to_owned();
        if self.random.below(2) == 0 {
            let done = fs::create_dir(self.dir.join(&name));
            assert_same("mkdir", &name, done, self.model.make(&name, Inode::Directory));
        } else {
            let done = fs::remove_dir(self.dir.join(&name));
            assert_same("rmdir", &name, done, self.model.rmdir(&name));
        }
    }
}

fn assert_same<T: PartialEq>(operation: &str, names: &str, found: io::Result<T>, expected: Expected<T>) {
    let found = found.map_err(|error| error.raw_os_error().unwrap_or(0));
    let word = |result: &Expected<T>| result.as_ref().map(|_| "it succeeds").map_err(|errno| *errno);
    assert!(found == expected, "{operation} {names}: {:?}, not {:?}", word(&found), word(&expected));
}

/// A user on a thread of its own.
struct Running {
    steps: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Model>,
}

impl Running {
    fn start(dir: PathBuf, seed: u64) -> Self {
        let (steps, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, stopped) = (Arc::clone(&steps), Arc::clone(&stop));
        let mut user = User { dir, model: Model::default(), random: Random::new(seed) };
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                user.step();
                counted.fetch_add(1, Ordering::Relaxed);
            }
            user.model
        });
        Self { steps, stop, thread }
    }

    fn wait_for_steps(&self, number: u64) {
        let (before, begun) = (self.steps.load(Ordering::Relaxed), Instant::now());
        while self.steps.load(Ordering::Relaxed) < before + number {
            assert!(!self.thread.is_finished(), "a user failed");
            assert!(begun.elapsed() < here(TIMEOUT), "a user waits");
            std::thread::yield_now();
        }
    }

    fn end(self) -> Model {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// Kills the daemon, its successor after so many system calls, and has another one continue. Returns
/// whether the successor was ready before it was killed.
fn killed_twice(volume: &mut Volume, calls: usize) -> bool {
    volume.add_successor(SETUP);
    volume.add_successor(SETUP);
    let next = volume.next_pid();
    let was_ready = std::thread::scope(|scope| {
        let (traced, is_traced) = mpsc::channel();
        let tracing = scope.spawn(move || {
            let tracer = Tracer::of(next);
            traced.send(()).unwrap();
            tracer.kill_after(calls)
        });
        is_traced.recv().unwrap();
        volume.kill();
        let is_ready = volume.try_to_take_over(SETUP).is_ok();
        if is_ready {
            // It may serve a while before it has made so many.
            kill_process(next);
        }
        tracing.join().unwrap();
        is_ready
    });
    if was_ready {
        volume.forget_daemon();
    }
    volume.take_over(SETUP);
    was_ready
}

fn kill_process(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    // Its tracer may have killed it.
    let _is_dead = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

#[test]
fn a_model_agrees_with_every_answer_while_successors_are_killed_at_each_step() {
    let seed = Random::seed(SEED);
    eprintln!("{SEED}={seed}");
    let mut volume = Volume::with(SETUP);
    let users: Vec<_> = (0..2)
        .map(|number| {
            let dir = volume.path.join(format!("user{number}"));
            fs::create_dir(&dir).unwrap();
            Running::start(dir, seed + number)
        })
        .collect();
    let (mut calls, mut ready) = (1, 0);
    // Not all takeovers have as many steps.
    while ready < 5 {
        users.iter().for_each(|user| user.wait_for_steps(3));
        ready += u32::from(killed_twice(&mut volume, calls));
        calls += 1;
        assert!(calls < 2000, "no takeover ends");
    }
    eprintln!("{calls} system calls");
    users.iter().for_each(|user| user.wait_for_steps(20));
    for (number, user) in users.into_iter().enumerate() {
        let model = user.end();
        let name = format!("user{number}");
        model.assert_is(&volume.path.join(&name));
        model.assert_is(&volume.backing.join(&name));
    }
}
