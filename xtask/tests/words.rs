//! What users read has none of the words that CONTRIBUTING.md replaces: error messages, log lines,
//! answers to callers, `--help`, README.md and ARCHITECTURE.md.
//!
//! Every string literal of a product counts, except those of test modules: so texts of `format!`,
//! `bail!` and reasons in CNI and gRPC answers are found too.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cargo_metadata::{Metadata, MetadataCommand};
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{
    Attribute, Expr, ExprLit, ImplItemFn, ItemEnum, ItemFn, ItemMod, ItemStruct, Lit, LitStr, Macro, Meta,
};

/// Whole words, in lower case. The first of each row is in CONTRIBUTING.md; the others are its forms.
const REPLACED: [&[&str]; 22] = [
    &["believe", "believed", "believes"],
    &["blow"],
    &["by now"],
    &["deed"],
    &["desk"],
    &["doubt", "doubts"],
    &["for good"],
    &["in vain"],
    &["kit"],
    &["last words"],
    &["let go", "lets go"],
    &["nobody", "nobody's"],
    &["patience"],
    &["says", "said", "say", "saying"],
    &["somebody"],
    &["strike", "strikes", "struck"],
    &["taken back", "takes back", "took back"],
    &["tells", "tell", "told"],
    &["twin", "twins"],
    &["whereabouts"],
    &["whoever"],
    &["wish", "wishes"],
];

/// A text that keeps a replaced word.
struct Exception {
    /// The end of its file's path.
    file: &'static str,
    /// A part of the text.
    part: &'static str,
    reason: &'static str,
}

const EXCEPTIONS: [Exception; 2] = [
    Exception {
        file: "conformance/src/bin/lab/disk.rs",
        part: "nobody:x:65534",
        reason: "the user `nobody` of passwd(5)",
    },
    Exception {
        file: "conformance/src/cri/images.rs",
        part: "nobody:x:65534",
        reason: "the user `nobody` of passwd(5)",
    },
];

/// The only package whose texts no user sees.
const TEST_SUPPORT: &str = "tests";

const PAGES: [&str; 2] = ["README.md", "ARCHITECTURE.md"];

/// A text, and the file and line where it stands.
struct Text {
    text: String,
    file: PathBuf,
    line: usize,
}

/// The texts of one file.
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

    fn add(&mut self, text: &LitStr) {
        let line = text.span().start().line;
        self.found.push(Text { text: text.value(), file: self.file.to_owned(), line });
    }

    /// What a macro or an attribute is called with.
    fn add_all(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => self.add_all(group.stream()),
                TokenTree::Literal(literal) => {
                    if let Lit::Str(text) = Lit::new(literal) {
                        self.add(&text);
                    }
                }
                TokenTree::Ident(_) | TokenTree::Punct(_) => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Shown<'_> {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !item.attrs.iter().any(is_for_tests) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if !item.attrs.iter().any(is_for_tests) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if !item.attrs.iter().any(is_for_tests) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        self.visit_of_clap(&item.attrs, |this| visit::visit_item_struct(this, item));
    }

    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        self.visit_of_clap(&item.attrs, |this| visit::visit_item_enum(this, item));
    }

    fn visit_lit_str(&mut self, text: &'ast LitStr) {
        self.add(text);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.add_all(call.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        let is_of_a_lint = ["allow", "expect"].iter().any(|name| attribute.path().is_ident(name));
        match &attribute.meta {
            Meta::List(list) if !is_of_a_lint => self.add_all(list.tokens.clone()),
            Meta::NameValue(doc) if self.is_help && doc.path.is_ident("doc") => {
                if let Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) = &doc.value {
                    self.add(text);
                }
            }
            _ => {}
        }
    }
}

/// Whether no product has it: `cfg(test)`, also with fuzz targets beside tests.
fn is_for_tests(attribute: &Attribute) -> bool {
    let conditions = ["test", "any (test , fuzzing)"];
    match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => {
            conditions.contains(&list.tokens.to_string().as_str())
        }
        _ => false,
    }
}

fn derives_help(attribute: &Attribute) -> bool {
    let Meta::List(list) = &attribute.meta else { return false };
    let shown = ["Args", "Parser", "Subcommand", "ValueEnum"];
    let is_shown =
        |token: TokenTree| matches!(token, TokenTree::Ident(name) if shown.iter().any(|s| name == s));
    list.path.is_ident("derive") && list.tokens.clone().into_iter().any(is_shown)
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

/// The strings of all products, and their help.
fn texts_of_products(metadata: &Metadata) -> Vec<Text> {
    let mut texts = Vec::new();
    for package in metadata.packages.iter().filter(|package| *package.name != TEST_SUPPORT) {
        let dir = package.manifest_path.parent().expect("a file lies in a directory").join("src");
        let files: Vec<_> = sources(dir.as_std_path()).into_iter().map(parsed).collect();
        let of_tests: BTreeSet<PathBuf> =
            files.iter().flat_map(|(path, file)| test_modules(path, file)).collect();
        for (path, file) in &files {
            if path.ancestors().any(|path| of_tests.contains(&path.with_extension(""))) {
                continue;
            }
            let mut shown = Shown { file: path, is_help: false, found: Vec::new() };
            shown.visit_file(file);
            texts.append(&mut shown.found);
        }
    }
    texts
}

fn parsed(path: PathBuf) -> (PathBuf, syn::File) {
    let code = std::fs::read_to_string(&path).expect("a source can be read");
    let file = syn::parse_file(&code).expect("it compiles");
    (path, file)
}

/// The modules that a file declares for tests, as their paths without an extension.
fn test_modules(path: &Path, file: &syn::File) -> Vec<PathBuf> {
    let is_root = ["lib", "main"].iter().any(|root| path.file_stem().is_some_and(|stem| stem == *root));
    let dir = if is_root {
        path.parent().expect("a file lies in a directory").to_owned()
    } else {
        path.with_extension("")
    };
    let modules = file.items.iter().filter_map(|item| match item {
        syn::Item::Mod(module) if module.attrs.iter().any(is_for_tests) => {
            Some(dir.join(module.ident.to_string()))
        }
        _ => None,
    });
    modules.collect()
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
            // Names in backticks are those of the code.
            let text = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
            found.push(Text { text, file: page.to_owned(), line: number + 1 });
        }
    }
    found
}

/// The first replaced word in `text`.
fn replaced_word(text: &str) -> Option<&'static str> {
    let text = text.to_lowercase();
    let is_inner =
        |letter: Option<char>| letter.is_some_and(|l| l.is_alphanumeric() || l == '_' || l == '\'');
    REPLACED.into_iter().flatten().copied().find(|word| {
        text.match_indices(word).any(|(at, _)| {
            !is_inner(text[..at].chars().next_back()) && !is_inner(text[at + word.len()..].chars().next())
        })
    })
}

/// Without the placeholders of `format!`, whose names no user sees.
fn without_placeholders(text: &str) -> String {
    let mut rest = text;
    let mut out = String::new();
    while let Some((before, after)) = rest.split_once('{') {
        out.push_str(before);
        rest = match after.split_once('}') {
            Some((inner, behind)) if !inner.contains([' ', '"', '{']) => behind,
            _ => after,
        };
    }
    out + rest
}

#[test]
fn what_users_read_has_no_replaced_word() {
    let metadata = metadata();
    let mut texts = texts_of_products(&metadata);
    assert!(texts.len() > 5000, "only {} texts were found", texts.len());
    texts.extend(PAGES.iter().flat_map(|page| prose(metadata.workspace_root.join(page).as_std_path())));
    let mut report = String::new();
    let mut used = BTreeSet::new();
    for Text { text, file, line } in &texts {
        let Some(word) = replaced_word(&without_placeholders(text)) else { continue };
        let of_text = |exception: &Exception| file.ends_with(exception.file) && text.contains(exception.part);
        match EXCEPTIONS.iter().position(of_text) {
            Some(exception) => drop(used.insert(exception)),
            None => report += &format!("  {}:{line}: {word:?} in {text:?}\n", file.display()),
        }
    }
    for (_, Exception { file, part, reason }) in
        EXCEPTIONS.iter().enumerate().filter(|(exception, _)| !used.contains(exception))
    {
        report += &format!("  no text needs the exception {part:?} in {file} ({reason})\n");
    }
    assert!(report.is_empty(), "\n{report}");
}

#[test]
fn the_table_of_contributing_has_the_words_that_are_replaced() {
    let page = metadata().workspace_root.join("CONTRIBUTING.md");
    let page = std::fs::read_to_string(page).expect("a page can be read");
    let rows = page.lines().skip_while(|line| !line.starts_with("| instead of |")).skip(2);
    let rows = rows.map_while(|line| line.strip_prefix("| ")?.split_once(" |"));
    let listed: BTreeSet<&str> = rows.flat_map(|(words, _)| words.split(", ")).collect();
    assert_eq!(listed, REPLACED.iter().map(|forms| forms[0]).collect());
}

#[test]
fn words_are_found_whole() {
    assert_eq!(replaced_word("Nobody listens"), Some("nobody"));
    assert_eq!(replaced_word("it is taken back, then"), Some("taken back"));
    assert_eq!(replaced_word("intelligent wishful storytelling"), None);
}

#[test]
fn names_of_placeholders_do_not_count() {
    assert_eq!(without_placeholders("ended: {said}, {told:?}"), "ended: , ");
    assert_eq!(without_placeholders(r#"{"a": "b"} {{says it}}"#), r#""a": "b"} says it}}"#);
}

#[test]
fn strings_are_found_wherever_they_stand_outside_tests() {
    let code = r##"
        #[derive(Parser)]
        struct Arguments {
            /// help
            #[arg(help = "attribute")]
            a: u8,
        }
        /// comment
        #[expect(lint, reason = "lint")]
        const A: &str = "constant";
        fn f() {
            bail!("macro {}", [format!("inner")]);
        }
        #[cfg(test)]
        mod tests {
            const A: &str = "test";
        }
    "##;
    let mut shown = Shown { file: Path::new("a.rs"), is_help: false, found: Vec::new() };
    shown.visit_file(&syn::parse_file(code).expect("it is code"));
    let found: Vec<_> = shown.found.iter().map(|text| text.text.trim()).collect();
    assert_eq!(found, ["help", "attribute", "constant", "macro {}", "inner"]);
}
