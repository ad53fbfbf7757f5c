//! Modules of a crate do not use each other in a circle, and layers only those below them.
//!
//! An edge is a path in the code of one module to another module of the same crate, the longest
//! that the path names. Edges between a module and one above it do not count, and neither does
//! code for tests (`#[cfg(test)]`). A path through a re-export leads to the module that re-exports.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use cargo_metadata::{Metadata, MetadataCommand, Package, Target, TargetKind};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, UseTree};

/// From the root: `["engine", "stage"]`. The root is empty.
type Module = Vec<String>;

/// Where an edge stands: a file and its line.
type Place = (PathBuf, usize);

#[derive(Debug, Default)]
struct Crate {
    modules: BTreeSet<Module>,
    /// From a module to another, with the first path that leads there.
    edges: BTreeMap<(Module, Module), Place>,
}

struct Source {
    module: Module,
    file: PathBuf,
    items: Vec<Item>,
}

impl Crate {
    fn read(root: &Path) -> Self {
        let mut sources = Vec::new();
        let dir = root.parent().expect("a file lies in a directory");
        collect(&mut sources, Vec::new(), root, dir);
        let modules = sources.iter().map(|source| source.module.clone()).collect();
        let mut this = Self { modules, edges: BTreeMap::new() };
        for source in &sources {
            let mut paths = Paths { of: &this.modules, source, found: Vec::new() };
            source.items.iter().for_each(|item| paths.visit_item(item));
            for (to, line) in paths.found {
                this.edges.entry((source.module.clone(), to)).or_insert((source.file.clone(), line));
            }
        }
        this
    }

    /// Each group of modules that all reach each other, with the edges within it.
    fn circles(&self) -> Vec<Vec<String>> {
        let mut circles = Vec::new();
        let mut reported = BTreeSet::new();
        for module in &self.modules {
            if reported.contains(module) {
                continue;
            }
            let group: BTreeSet<&Module> = self
                .reached_from(module)
                .into_iter()
                .filter(|other| self.reached_from(other).contains(module))
                .collect();
            if group.len() > 1 {
                let within = |edge: &(Module, Module)| group.contains(&edge.0) && group.contains(&edge.1);
                let edges = self.edges.iter().filter(|(edge, _)| within(edge));
                circles.push(edges.map(|((from, to), place)| describe(from, to, place)).collect());
                reported.extend(group.into_iter().cloned());
            }
        }
        circles
    }

    fn reached_from<'a>(&'a self, start: &'a Module) -> BTreeSet<&'a Module> {
        let (mut reached, mut next) = (BTreeSet::new(), vec![start]);
        while let Some(module) = next.pop() {
            for (from, to) in self.edges.keys() {
                if from == module && reached.insert(to) {
                    next.push(to);
                }
            }
        }
        reached
    }
}

fn describe(from: &Module, to: &Module, (file, line): &Place) -> String {
    format!("{}:{line}: {} uses {}", file.display(), from.join("::"), to.join("::"))
}

/// The modules of `file` and below; those of children lie in `dir`.
fn collect(sources: &mut Vec<Source>, module: Module, file: &Path, dir: &Path) {
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let items = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display())).items;
    collect_items(sources, module, file, dir, items);
}

fn collect_items(sources: &mut Vec<Source>, module: Module, file: &Path, dir: &Path, items: Vec<Item>) {
    let mut own = Vec::new();
    for item in items {
        let Item::Mod(child) = item else {
            own.push(item);
            continue;
        };
        if is_for_tests(&child.attrs) {
            continue;
        }
        let name = child.ident.to_string();
        let mut path = module.clone();
        path.push(name.clone());
        let below = dir.join(&name);
        match child.content {
            Some((_, items)) => collect_items(sources, path, file, &below, items),
            None => {
                let beside = dir.join(format!("{name}.rs"));
                let found = if beside.is_file() { beside } else { below.join("mod.rs") };
                collect(sources, path, &found, &below);
            }
        }
    }
    sources.push(Source { module, file: file.to_owned(), items: own });
}

/// Whether no product has it: `cfg(test)`, also with fuzz targets beside tests.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    let conditions = ["test", "any (test , fuzzing)"];
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            conditions.contains(&list.tokens.to_string().as_str())
        }
        _ => false,
    })
}

/// Finds the edges of one module.
struct Paths<'a> {
    of: &'a BTreeSet<Module>,
    source: &'a Source,
    found: Vec<(Module, usize)>,
}

impl Paths<'_> {
    fn names(&mut self, segments: &[String], line: usize) {
        let Some(to) = self.resolve(segments) else { return };
        let from = &self.source.module;
        if !to.starts_with(from) && !from.starts_with(&to) {
            self.found.push((to, line));
        }
    }

    /// The module that a path leads to: `None` for a path out of the crate.
    fn resolve(&self, segments: &[String]) -> Option<Module> {
        let mut at = self.source.module.clone();
        let mut rest = segments;
        let mut anchored = false;
        while let [first, others @ ..] = rest {
            match first.as_str() {
                "crate" => at.clear(),
                "self" => {}
                "super" => drop(at.pop()?),
                _ => break,
            }
            (anchored, rest) = (true, others);
        }
        let child = |at: &Module, name: &String| at.iter().chain([name]).cloned().collect::<Module>();
        while let Some((name, others)) = rest.split_first()
            && self.of.contains(&child(&at, name))
        {
            at = child(&at, name);
            (anchored, rest) = (true, others);
        }
        anchored.then_some(at)
    }

    fn tree(&mut self, before: &[String], tree: &UseTree) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.tree(&with(&path.ident), &path.tree),
            UseTree::Name(name) => self.names(&with(&name.ident), name.span().start().line),
            UseTree::Rename(name) => self.names(&with(&name.ident), name.span().start().line),
            UseTree::Glob(glob) => self.names(before, glob.span().start().line),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.tree(before, tree)),
        }
    }

    /// What a macro is called with is no syntax tree: `crate::a::B` is found as its tokens.
    fn tokens(&mut self, tokens: TokenStream) {
        let (mut path, mut line) = (Vec::<String>::new(), 0);
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) if path.is_empty() || colons == 2 => {
                    line = name.span().start().line;
                    path.push(name.to_string());
                    colons = 0;
                    continue;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => {
                    colons += 1;
                    continue;
                }
                TokenTree::Group(group) => {
                    if group.delimiter() != Delimiter::None || path.is_empty() {
                        self.tokens(group.stream());
                    }
                }
                TokenTree::Ident(name) => {
                    self.names(&std::mem::take(&mut path), line);
                    path.push(name.to_string());
                    (line, colons) = (name.span().start().line, 0);
                    continue;
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
            self.names(&std::mem::take(&mut path), line);
            colons = 0;
        }
        self.names(&path, line);
    }
}

impl<'a> Visit<'a> for Paths<'_> {
    fn visit_item(&mut self, item: &'a Item) {
        let attributes = match item {
            Item::Const(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Static(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        self.tree(&[], &item.tree);
    }

    fn visit_visibility(&mut self, _restricted: &'a syn::Visibility) {}

    fn visit_path(&mut self, path: &'a syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if segments.len() > 1 {
            self.names(&segments, path.span().start().line);
        }
        visit::visit_path(self, path);
    }

    fn visit_attribute(&mut self, attribute: &'a Attribute) {
        if let syn::Meta::List(list) = &attribute.meta {
            self.tokens(list.tokens.clone());
        }
    }

    fn visit_macro(&mut self, call: &'a syn::Macro) {
        self.tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }
}

fn metadata() -> Metadata {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    MetadataCommand::new().manifest_path(manifest).no_deps().exec().expect("cargo metadata")
}

/// The library and the programs of a package.
fn products(package: &Package) -> impl Iterator<Item = &Target> {
    let is_product = |kind: &TargetKind| matches!(kind, TargetKind::Lib | TargetKind::Bin);
    package.targets.iter().filter(move |target| target.kind.iter().any(is_product))
}

#[test]
fn no_modules_use_each_other_in_a_circle() {
    let mut report = String::new();
    for package in &metadata().packages {
        for target in products(package) {
            for circle in Crate::read(target.src_path.as_std_path()).circles() {
                report +=
                    &format!("{} {}: {} uses within a circle\n", package.name, target.name, circle.len());
                circle.iter().for_each(|edge| report += &format!("  {edge}\n"));
            }
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

struct Layer {
    name: &'static str,
    may_use: &'static [&'static str],
}

/// The root of the crate may use all.
const LAYERS_OF_THE_DRIVER: [Layer; 10] = [
    Layer { name: "error", may_use: &["model"] },
    Layer { name: "model", may_use: &["error"] },
    Layer { name: "config", may_use: &["error", "model"] },
    Layer { name: "kernel", may_use: &["config", "error", "model"] },
    Layer { name: "journal", may_use: &["error", "kernel", "model"] },
    Layer { name: "backend", may_use: &["error", "kernel", "model"] },
    Layer { name: "daemon", may_use: &["config", "error", "kernel", "model"] },
    Layer {
        name: "engine",
        may_use: &["backend", "config", "daemon", "error", "journal", "kernel", "model"],
    },
    Layer { name: "wire", may_use: &["config", "engine", "error", "kernel", "model"] },
    Layer {
        name: "operations",
        may_use: &["backend", "config", "daemon", "engine", "error", "journal", "kernel", "model"],
    },
];

/// From the lowest to the highest.
const LAYERS_OF_THE_KUBELET: [Layer; 22] = [
    Layer { name: "objects", may_use: &[] },
    Layer { name: "backoff", may_use: &["objects"] },
    Layer { name: "command_line", may_use: &["objects"] },
    Layer { name: "node", may_use: &[] },
    Layer { name: "pod", may_use: &["backoff", "node", "objects"] },
    Layer { name: "capacity", may_use: &["command_line", "objects", "pod"] },
    Layer { name: "store", may_use: &["capacity", "command_line", "objects", "pod"] },
    Layer { name: "sink", may_use: &["objects", "store"] },
    Layer { name: "clients", may_use: &["backoff", "objects", "store"] },
    Layer { name: "pod_state", may_use: &["backoff", "clients", "objects", "pod"] },
    Layer {
        name: "volumes",
        may_use: &["backoff", "capacity", "clients", "command_line", "objects", "pod", "sink", "store"],
    },
    Layer { name: "logs", may_use: &["objects"] },
    Layer { name: "container_config", may_use: &["clients", "logs", "objects", "pod", "store", "volumes"] },
    Layer {
        name: "worker",
        may_use: &[
            "backoff",
            "capacity",
            "clients",
            "container_config",
            "logs",
            "objects",
            "pod",
            "pod_state",
            "sink",
            "store",
            "volumes",
        ],
    },
    Layer {
        name: "engine",
        may_use: &[
            "backoff",
            "capacity",
            "clients",
            "command_line",
            "container_config",
            "logs",
            "node",
            "objects",
            "pod",
            "sink",
            "store",
            "volumes",
            "worker",
        ],
    },
    Layer { name: "config", may_use: &["capacity", "command_line", "node", "objects"] },
    Layer { name: "manifest", may_use: &["objects", "pod", "store"] },
    Layer { name: "source", may_use: &["manifest", "objects", "store"] },
    Layer {
        name: "standalone",
        may_use: &[
            "backoff", "clients", "config", "engine", "logs", "manifest", "node", "objects", "pod", "source",
            "store", "volumes", "worker",
        ],
    },
    Layer {
        name: "endpoints",
        may_use: &["clients", "config", "engine", "node", "objects", "source", "standalone", "volumes"],
    },
    Layer {
        name: "run",
        may_use: &[
            "capacity",
            "clients",
            "config",
            "endpoints",
            "engine",
            "node",
            "objects",
            "sink",
            "source",
            "standalone",
            "store",
        ],
    },
    Layer {
        name: "cli",
        may_use: &["clients", "command_line", "config", "manifest", "objects", "pod", "run"],
    },
];

/// From the lowest to the highest, after two beside all.
const LAYERS_OF_THE_RUNTIME: [Layer; 16] = [
    Layer { name: "error", may_use: &["cni", "images", "registry", "shim_client", "spec"] },
    Layer { name: "reexec", may_use: &["error", "images", "registry", "shim"] },
    Layer { name: "locks", may_use: &[] },
    Layer { name: "blocking", may_use: &["error"] },
    Layer { name: "disk", may_use: &["blocking", "error"] },
    Layer { name: "cni", may_use: &["disk", "error"] },
    Layer { name: "images", may_use: &["disk", "error", "reexec"] },
    Layer { name: "registry", may_use: &["blocking", "disk", "error", "images", "locks", "reexec"] },
    Layer { name: "spec", may_use: &["error", "images"] },
    Layer { name: "launcher", may_use: &["error", "shim", "spec"] },
    Layer { name: "shim", may_use: &["disk", "error", "launcher", "spec"] },
    Layer { name: "shim_client", may_use: &["blocking", "disk", "error", "reexec", "shim"] },
    Layer {
        name: "runtime",
        may_use: &[
            "blocking",
            "cni",
            "disk",
            "error",
            "images",
            "locks",
            "registry",
            "shim",
            "shim_client",
            "spec",
        ],
    },
    Layer {
        name: "calls",
        may_use: &[
            "blocking",
            "cni",
            "disk",
            "error",
            "images",
            "launcher",
            "registry",
            "runtime",
            "shim",
            "shim_client",
            "spec",
        ],
    },
    Layer { name: "server", may_use: &["blocking", "calls", "error", "images", "runtime", "shim", "spec"] },
    Layer {
        name: "start",
        may_use: &[
            "blocking",
            "calls",
            "cni",
            "disk",
            "error",
            "images",
            "reexec",
            "runtime",
            "shim",
            "shim_client",
            "spec",
        ],
    },
];

#[test]
fn layers_of_the_driver_use_only_those_that_they_may() {
    let misuses = misuses("csi-driver", &LAYERS_OF_THE_DRIVER);
    assert!(misuses.is_empty(), "\n{misuses}");
}

#[test]
fn layers_of_the_kubelet_use_only_those_that_they_may() {
    let misuses = misuses("kubelet", &LAYERS_OF_THE_KUBELET);
    assert!(misuses.is_empty(), "\n{misuses}");
}

#[test]
fn layers_of_the_runtime_use_only_those_that_they_may() {
    let misuses = misuses("runtime", &LAYERS_OF_THE_RUNTIME);
    assert!(misuses.is_empty(), "\n{misuses}");
}

/// The uses between layers of a library that `layers` does not have, and layers that do not exist.
fn misuses(package: &str, layers: &[Layer]) -> String {
    let metadata = metadata();
    let package = metadata.packages.iter().find(|found| found.name == package).expect("it exists");
    let library = products(package).find(|target| target.is_lib()).expect("it has a library");
    let this = Crate::read(library.src_path.as_std_path());
    let mut report = String::new();
    for name in layers.iter().flat_map(|layer| layer.may_use.iter().chain([&layer.name])) {
        if !this.modules.contains(&vec![(*name).to_owned()]) {
            report += &format!("  {}: there is no module {name}\n", package.name);
        }
    }
    for ((from, to), (file, line)) in this.edges {
        let (Some(from_layer), Some(to_layer)) = (from.first(), to.first()) else { continue };
        let layer = layers.iter().find(|layer| layer.name == from_layer);
        if from_layer != to_layer && !layer.is_some_and(|layer| layer.may_use.contains(&to_layer.as_str())) {
            let (from, to) = (from.join("::"), to.join("::"));
            report += &format!("  {}:{line}: {from} must not use {to}\n", file.display());
        }
    }
    report
}

/// The top of the driver is one screen: its layers, and what all of them use.
const MOST_FILES_AT_THE_DRIVERS_ROOT: usize = 12;
/// `lib.rs`, `main.rs` and the layers.
const MOST_FILES_AT_THE_KUBELETS_ROOT: usize = 24;
const MOST_FILES_AT_THE_RUNTIMES_ROOT: usize = 20;

#[test]
fn the_root_of_the_driver_stays_small() {
    let files = files_at_the_root("csi-driver");
    assert!(files.len() <= MOST_FILES_AT_THE_DRIVERS_ROOT, "{} files: {files:#?}", files.len());
}

#[test]
fn the_root_of_the_kubelet_stays_small() {
    let files = files_at_the_root("kubelet");
    assert!(files.len() <= MOST_FILES_AT_THE_KUBELETS_ROOT, "{} files: {files:#?}", files.len());
}

#[test]
fn the_root_of_the_runtime_stays_small() {
    let files = files_at_the_root("runtime");
    assert!(files.len() <= MOST_FILES_AT_THE_RUNTIMES_ROOT, "{} files: {files:#?}", files.len());
}

fn files_at_the_root(package: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(package).join("src");
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(dir).expect("it exists").map(|entry| entry.expect("it is listed").path()).collect();
    files.retain(|path| path.is_file());
    files
}

/// Modules of a crate, and others of it that they must not use, nor anything below them. The head
/// of the crate says the same in words.
struct Rule {
    package: &'static str,
    modules: &'static [&'static str],
    must_not_use: &'static [&'static str],
}

const RULES: [Rule; 8] = [
    // What decides does no I/O.
    Rule {
        package: "cni-bridge",
        modules: &["keys", "config", "vlan", "plan", "masquerade", "spoof", "iptables_chain"],
        must_not_use: &[
            "attach",
            "container",
            "gateway",
            "rules",
            "legacy",
            "undo",
            "add",
            "del",
            "check",
            "status",
            "gc",
        ],
    },
    Rule {
        package: "cni-portmap",
        modules: &[
            "config",
            "conditions",
            "mapping",
            "nftables::rules",
            "nftables::plan",
            "iptables::rules",
            "iptables::plan",
        ],
        must_not_use: &["localnet", "flows", "add", "del", "check", "status", "gc"],
    },
    Rule {
        package: "ipam-host-local",
        modules: &["config", "range", "lease", "index::format"],
        must_not_use: &["files", "index", "store"],
    },
    Rule { package: "netfilter", modules: &["nftables"], must_not_use: &["conntrack"] },
    Rule { package: "netfilter", modules: &["conntrack"], must_not_use: &["nftables"] },
    // What a pod needs and reports is decided without I/O. `observed` has called the runtime.
    Rule {
        package: "kubelet",
        modules: &["pod_state::plan", "pod_state::status", "pod_state::probe_results"],
        must_not_use: &["clients"],
    },
    // What a backend sees knows nothing of FUSE, nor of the daemon around it.
    Rule {
        package: "volume-fs",
        modules: &[
            "backend",
            "failure",
            "figures",
            "file",
            "request",
            "gate",
            "notifications",
            "descriptors",
        ],
        must_not_use: &["filesystem", "control", "handover", "metrics", "confine", "config", "seccomp"],
    },
    // The file system does not know requests.
    Rule {
        package: "volume-local",
        modules: &[
            "attributes",
            "count",
            "directory",
            "errno",
            "handles",
            "nodes",
            "quota",
            "usage_file",
            "volume",
            "xattrs",
        ],
        must_not_use: &["backend", "service", "pruner"],
    },
];

#[test]
fn modules_keep_the_rules_of_their_crate() {
    let metadata = metadata();
    let mut report = String::new();
    for Rule { package, modules, must_not_use } in &RULES {
        let found = metadata.packages.iter().find(|found| found.name == package).expect("it exists");
        for target in products(found) {
            let this = Crate::read(target.src_path.as_std_path());
            let is_below = |module: &Module, of: &str| {
                let path = module.join("::");
                path.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
            };
            let is_one = |module: &Module, of: &[&str]| of.iter().any(|of| is_below(module, of));
            if this.modules.len() > 2 {
                for name in modules.iter().chain(*must_not_use) {
                    if !this.modules.iter().any(|module| is_below(module, name)) {
                        report += &format!("  {package}: there is no module {name}\n");
                    }
                }
            }
            for ((from, to), (file, line)) in &this.edges {
                if is_one(from, modules) && is_one(to, must_not_use) && !is_one(to, modules) {
                    let (from, to) = (from.join("::"), to.join("::"));
                    report += &format!("  {}:{line}: {from} must not use {to}\n", file.display());
                }
            }
        }
    }
    assert!(report.is_empty(), "\n{report}");
}
