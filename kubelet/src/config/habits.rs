//! What fingers that know kubectl type: flags before the command, values of switches, and commands that do not
//! exist here.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{ArgAction, Command};

use crate::command_line::called_as::called_as;

/// Flags that may come before the command; each takes a value.
const EVERYWHERE: [&str; 3] = ["-n", "--namespace", "--root-dir"];
/// Flags that choose a cluster.
const OF_CLUSTERS: [&str; 4] = ["--cluster", "--context", "--kubeconfig", "--server"];

/// The words of a command line as `command` reads them, or what to do instead. The first one is the program's name.
pub(super) fn translate(words: Vec<OsString>, command: &mut Command) -> Result<Vec<OsString>, clap::Error> {
    let mut words = words.into_iter();
    let mut translated: Vec<OsString> = words.next().into_iter().collect();
    let mut rest: Vec<OsString> = words.collect();
    let flags = take_leading_flags(&mut rest);
    let verb = rest.first().and_then(|verb| verb.to_str()).unwrap_or_default().to_owned();
    if let Some(instead) = instead_of(&verb, &rest).or_else(|| instead_of_flag(&verb, &rest)) {
        return Err(command.error(ErrorKind::InvalidSubcommand, instead));
    }
    let Some(read_by) = command.find_subcommand(&verb).filter(|_| verb != "run").cloned() else {
        translated.extend(flags.into_iter().chain(rest));
        return Ok(translated);
    };
    if let Some(flag) = until_dashes(&rest).find_map(of_cluster) {
        let message = format!("{flag}: there is one kubelet and no cluster; --root-dir names the kubelet");
        return Err(command.error(ErrorKind::UnknownArgument, message));
    }
    let mut rest = rest.into_iter();
    translated.extend(rest.next());
    translated.extend(flags);
    let mut are_flags = true;
    for word in rest {
        are_flags &= word != "--";
        match word.to_str().filter(|_| are_flags).and_then(|word| switch(&read_by, word)) {
            Some((flag, true)) => translated.push(flag.into()),
            Some((_, false)) => {}
            None => translated.push(word),
        }
    }
    Ok(translated)
}

/// `-n shop`, `-nshop`, `--namespace shop` and `--namespace=shop` at the beginning.
fn take_leading_flags(words: &mut Vec<OsString>) -> Vec<OsString> {
    let mut taken = 0;
    while let Some(word) = words.get(taken).and_then(|word| word.to_str()) {
        let Some(flag) = EVERYWHERE.iter().find(|flag| word.starts_with(**flag)) else { break };
        let is_alone = word == *flag;
        let has_value = word.strip_prefix(flag).is_some_and(|value| value.starts_with('=')) || *flag == "-n";
        if !is_alone && !has_value {
            break;
        }
        taken += if is_alone { 2 } else { 1 };
    }
    words.drain(..taken.min(words.len())).collect()
}

/// What follows belongs to a program in a container.
fn until_dashes(words: &[OsString]) -> impl Iterator<Item = &str> {
    words.iter().take_while(|word| *word != "--").filter_map(|word| word.to_str())
}

fn of_cluster(word: &str) -> Option<&'static str> {
    let name = word.split_once('=').map_or(word, |(name, _)| name);
    OF_CLUSTERS.into_iter().find(|flag| *flag == name)
}

/// The flag and the value of `--flag=true` and `--flag=false`, if the command has this switch.
fn switch<'a>(command: &Command, word: &'a str) -> Option<(&'a str, bool)> {
    let (flag, value) = word.split_once('=')?;
    let name = flag.strip_prefix("--")?;
    let is_switch =
        |arg: &&clap::Arg| arg.get_long() == Some(name) && matches!(arg.get_action(), ArgAction::SetTrue);
    command.get_arguments().find(is_switch)?;
    Some((flag, value.parse().ok()?))
}

/// For commands of kubectl that do not exist here.
fn instead_of(verb: &str, words: &[OsString]) -> Option<String> {
    let own = called_as();
    let instead = match verb {
        "run" if until_dashes(words).any(|word| word == "--image" || word.starts_with("--image=")) => {
            format!("`run` starts the kubelet: write a kind: Pod, and apply it with `{own} apply -f FILE`")
        }
        "create" => format!("there is no `create`: `{own} apply -f FILE` creates what a file describes"),
        "edit" | "label" | "annotate" | "patch" | "set" | "replace" | "taint" => format!(
            "there is no `{verb}`: print the object with `{own} get KIND NAME -o yaml`, change it, and apply it with `{own} \
             apply -f FILE`"
        ),
        "scale" | "autoscale" | "rollout" => {
            format!(
                "there is no `{verb}`: nothing here makes pods from a template, so apply or delete each kind: Pod"
            )
        }
        "expose" => format!(
            "there is no `expose`: give a container a ports[].hostPort, or use `{own} port-forward POD PORT`"
        ),
        "debug" => {
            format!("there is no `debug`: `{own} exec -it POD -- PROGRAM` runs a program of the image")
        }
        "explain" | "api-resources" => {
            format!("there is no `{verb}`: docs/FIELDS.md has the kinds and their fields")
        }
        "cordon" | "uncordon" | "drain" => {
            format!("there is no `{verb}`: there is one node; `{own} stop --pods` ends its pods")
        }
        "config" | "cluster-info" | "auth" | "proxy" => {
            format!("there is no `{verb}`: there is one kubelet and no cluster; --root-dir names the kubelet")
        }
        "version" => format!("there is no `version`: use `{own} --version`"),
        _ => return None,
    };
    Some(instead)
}

/// For flags and values of kubectl's `apply` and `delete` that do not exist here.
fn instead_of_flag(verb: &str, words: &[OsString]) -> Option<String> {
    if !matches!(verb, "apply" | "delete") {
        return None;
    }
    let own = called_as();
    let mut words = until_dashes(words);
    words.find_map(|word| {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        let url = [value, word, word.strip_prefix("-f").unwrap_or_default()]
            .into_iter()
            .find(|word| word.starts_with("https://") || word.starts_with("http://"));
        match (name, url) {
            ("--dry-run", _) if verb == "delete" => {
                Some(format!("there is no `--dry-run`: `{own} get` lists the objects that are there"))
            }
            ("--dry-run", _) => Some(format!(
                "there is no `--dry-run`: compare the file with what `{own} get KIND NAME -o yaml` prints; `{own} apply -f \
                 FILE` refuses an object with mistakes"
            )),
            ("--kustomize", _) => Some(of_kustomize(own, verb)),
            _ if name.starts_with("-k") => Some(of_kustomize(own, verb)),
            (_, Some(url)) => Some(format!(
                "-f takes no URL: download the file first (`curl -fsSL '{url}' | {own} {verb} -f -`)"
            )),
            _ => None,
        }
    })
}

fn of_kustomize(own: &str, verb: &str) -> String {
    format!("there is no `-k`: use `kubectl kustomize DIR | {own} {verb} -f -`")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::config::Cli;

    fn translated(line: &str) -> Result<String, String> {
        let words = line.split_whitespace().map(OsString::from).collect();
        let words = translate(words, &mut Cli::command()).map_err(|error| error.to_string())?;
        Ok(words.join(std::ffi::OsStr::new(" ")).into_string().unwrap())
    }

    /// What is typed, and what the command reads.
    fn assert_translated(lines: &[(&str, &str)]) {
        for (typed, read) in lines {
            assert_eq!(translated(typed).as_deref(), Ok(*read), "{typed}");
        }
    }

    #[test]
    fn flags_before_the_command_are_its_flags() {
        assert_translated(&[
            ("h -n shop get pods", "h get -n shop pods"),
            ("h -nshop --root-dir=/k get pods", "h get -nshop --root-dir=/k pods"),
            ("h --namespace=shop top pod", "h top --namespace=shop pod"),
            ("h --root-dir /k stop", "h stop --root-dir /k"),
            ("h get pods -n shop", "h get pods -n shop"),
            ("h --namespaces get", "h --namespaces get"),
            ("h -n", "h -n"),
            ("h --help", "h --help"),
            ("h", "h"),
        ]);
    }

    #[test]
    fn switches_take_true_and_false() {
        assert_translated(&[
            ("h logs web --all-containers=true --timestamps=false", "h logs web --all-containers"),
            (
                "h delete pod x --ignore-not-found=true --wait=false",
                "h delete pod x --ignore-not-found --wait=false",
            ),
            ("h get pods --no-headers=maybe", "h get pods --no-headers=maybe"),
            ("h exec web -- x --tty=true", "h exec web -- x --tty=true"),
        ]);
    }

    #[test]
    fn commands_that_do_not_exist_are_explained() {
        for (typed, words) in [
            ("h edit pod web", "-o yaml"),
            ("h -n shop create -f x", "apply -f"),
            ("h run nginx --image=nginx", "starts the kubelet"),
            ("h rollout restart deploy/x", "from a template"),
            ("h get pods --context=a", "there is one kubelet"),
            ("h --context a get pods", "unexpected"),
            ("h apply -f x --dry-run=client", "there is no `--dry-run`: compare the file"),
            (
                "h apply --dry-run server -f x",
                "`hawser-kubelet get KIND NAME -o yaml` prints; `hawser-kubelet apply -f FILE` refuses",
            ),
            ("h delete pod web --dry-run", "`hawser-kubelet get` lists"),
            ("h apply -k dir", "`kubectl kustomize DIR | hawser-kubelet apply -f -`"),
            ("h delete -kdir", "`kubectl kustomize DIR | hawser-kubelet delete -f -`"),
            ("h apply --kustomize=dir", "there is no `-k`"),
            ("h apply -f https://a/b?c=d", "(`curl -fsSL 'https://a/b?c=d' | hawser-kubelet apply -f -`)"),
            ("h -n shop apply -fhttp://a/b", "curl -fsSL 'http://a/b' |"),
            ("h delete --filename=https://a/b", "(`curl -fsSL 'https://a/b' | hawser-kubelet delete -f -`)"),
        ] {
            let error = translated(typed).and_then(|line| {
                let read = Cli::command().try_get_matches_from(line.split_whitespace());
                read.map(|_| line).map_err(|error| error.to_string())
            });
            assert!(error.as_ref().unwrap_err().contains(words), "{typed}: {error:?}");
        }
        assert_translated(&[
            ("h exec web -- x --context a", "h exec web -- x --context a"),
            ("h exec web -- curl -k https://a", "h exec web -- curl -k https://a"),
            ("h apply -f k -f http", "h apply -f k -f http"),
        ]);
    }
}
