//! What users read first has none of the words that CONTRIBUTING.md replaces: error messages,
//! `--help`, README.md and ARCHITECTURE.md.

use std::path::{Path, PathBuf};

use cargo_metadata::{Metadata, MetadataCommand};
use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, ExprLit, ItemEnum, ItemStruct, Lit, Meta};

/// Whole words, in lower case.
const REPLACED: [&str; 30] = [
    "believe",
    "believed",
    "believes",
    "blow",
    "by now",
    "deed",
    "desk",
    "doubt",
    "for good",
    "in vain",
    "last words",
    "let go",
    "lets go",
    "nobody",
    "nobody's",
    "patience",
    "somebody",
    "strike",
    "struck",
    "taken back",
    "takes back",
    "tell",
    "tells",
    "told",
    "took back",
    "twin",
    "whereabouts",
    "whoever",
    "wish",
    "wishes",
];

/// Packages whose errors and help users see.
const PRODUCTS: [&str; 17] = [
    "bench",
    "cni-bridge",
    "cni-loopback",
    "cni-plugin",
    "cni-portmap",
    "conformance",
    "csi-driver",
    "ipam-host-local",
    "kubelet",
    "linux",
    "netfilter",
    "proto",
    "runtime",
    "trace",
    "volume-fs",
    "volume-local",
    "xtask",
];

const PAGES: [&str; 2] = ["README.md", "ARCHITECTURE.md"];

/// A text, and the file and line where it stands.
struct Text {
    text: String,
    file: PathBuf,
    line: usize,
}

/// Error messages and help in one file.
struct Shown<'a> {
    file: &'a Path,
    /// Within an item that clap shows.
    is_help: bool,
    found: Vec<Text>,
}

impl Shown<'_> {
    fn visit_of_clap(&mut self, attributes: &[Attribute], walk: impl FnOnce(&mut Self)) {
        let outer = self.is_help;
        self.is_help |= attributes.iter().any(derives_help);
        walk(self);
        self.is_help = outer;
    }

    fn add(&mut self, text: String, line: usize) {
        self.found.push(Text { text, file: self.file.to_owned(), line });
    }
}

impl<'ast> Visit<'ast> for Shown<'_> {
    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        self.visit_of_clap(&item.attrs, |this| visit::visit_item_struct(this, item));
    }

    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        self.visit_of_clap(&item.attrs, |this| visit::visit_item_enum(this, item));
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        let line = attribute.span().start().line;
        match &attribute.meta {
            Meta::List(list) if list.path.is_ident("error") => {
                if let Some(text) = first_text(list.tokens.clone()) {
                    self.add(text, line);
                }
            }
            Meta::NameValue(doc) if self.is_help && doc.path.is_ident("doc") => {
                if let Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) = &doc.value {
                    self.add(text.value(), line);
                }
            }
            _ => {}
        }
    }
}

fn derives_help(attribute: &Attribute) -> bool {
    let Meta::List(list) = &attribute.meta else { return false };
    let shown = ["Args", "Parser", "Subcommand", "ValueEnum"];
    let is_shown =
        |token: TokenTree| matches!(token, TokenTree::Ident(name) if shown.iter().any(|s| name == s));
    list.path.is_ident("derive") && list.tokens.clone().into_iter().any(is_shown)
}

/// The string that a thiserror attribute begins with.
fn first_text(tokens: TokenStream) -> Option<String> {
    match syn::parse2::<Lit>(tokens.into_iter().next()?.into()) {
        Ok(Lit::Str(text)) => Some(text.value()),
        _ => None,
    }
}

fn metadata() -> Metadata {
    MetadataCommand::new().no_deps().exec().expect("cargo knows the workspace")
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let path = entry.expect("a directory can be read").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

fn errors_and_help(metadata: &Metadata) -> Vec<Text> {
    let mut texts = Vec::new();
    for name in PRODUCTS {
        let package = metadata.packages.iter().find(|package| *package.name == name).expect("it exists");
        let dir = package.manifest_path.parent().expect("a file lies in a directory").join("src");
        for file in sources(dir.as_std_path()) {
            let code = std::fs::read_to_string(&file).expect("a source can be read");
            let mut shown = Shown { file: &file, is_help: false, found: Vec::new() };
            shown.visit_file(&syn::parse_file(&code).expect("it compiles"));
            texts.append(&mut shown.found);
        }
    }
    texts
}

/// The lines of a page outside code blocks.
fn prose(page: &Path) -> Vec<Text> {
    let text = std::fs::read_to_string(page).unwrap_or_else(|e| panic!("{}: {e}", page.display()));
    let mut is_code = false;
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            found.push(Text { text: line.to_owned(), file: page.to_owned(), line: number + 1 });
        }
    }
    found
}

/// The first replaced word in `text`.
fn replaced_word(text: &str) -> Option<&'static str> {
    let text = text.to_lowercase();
    let is_inner =
        |letter: Option<char>| letter.is_some_and(|l| l.is_alphanumeric() || l == '_' || l == '\'');
    REPLACED.into_iter().find(|word| {
        text.match_indices(word).any(|(at, _)| {
            !is_inner(text[..at].chars().next_back()) && !is_inner(text[at + word.len()..].chars().next())
        })
    })
}

#[test]
fn what_users_read_first_has_no_replaced_word() {
    let metadata = metadata();
    let mut texts = errors_and_help(&metadata);
    assert!(texts.len() > 500, "only {} texts were found", texts.len());
    texts.extend(PAGES.iter().flat_map(|page| prose(metadata.workspace_root.join(page).as_std_path())));
    let mut report = String::new();
    for Text { text, file, line } in &texts {
        if let Some(word) = replaced_word(text) {
            report += &format!("  {}:{line}: {word:?} in {text:?}\n", file.display());
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

#[test]
fn words_are_found_whole() {
    assert_eq!(replaced_word("Nobody listens"), Some("nobody"));
    assert_eq!(replaced_word("it is taken back, then"), Some("taken back"));
    assert_eq!(replaced_word("intelligent wishful storytelling"), None);
}
