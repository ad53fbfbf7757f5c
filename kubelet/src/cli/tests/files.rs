//! Files and directories that commands name, as transcripts.

use super::*;

#[tokio::test]
async fn a_tree_of_files_is_applied_and_deleted_with_its_directories() {
    let fixture = Fixture::new();
    let top = fixture.dir.path().join("app");
    std::fs::create_dir_all(top.join("web/config")).unwrap();
    let write = |name: &str, text: &str| std::fs::write(top.join(name), text).unwrap();
    write(
        "web/config/map.yaml",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\ndata: {a: b}\n",
    );
    write("web/pod.yml", POD);
    let dir = top.display().to_string();
    let nothing = "error: error reading [DIR/app]: recognized file extensions are [.json .yaml .yml]";
    assert_eq!(fixture.run(&format!("apply -f {dir}")).await.unwrap_err(), nothing);
    write("z-claim.yaml", CLAIM);
    assert_eq!(
        fixture.run(&format!("apply -f {dir}")).await.unwrap(),
        "persistentvolumeclaim/data created\n",
        "without -R the directory alone"
    );
    assert_eq!(
        fixture.run(&format!("apply -R -f {dir}")).await.unwrap(),
        "configmap/settings created\npod/web created\npersistentvolumeclaim/data unchanged\n"
    );
    // A mistake in one file does not keep the others from being applied.
    write(
        "web/config/map.yaml",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\ndata: {a: c}\n",
    );
    write("web/config/wrong.yaml", "kind: Nothing\n");
    let (output, error) = fixture.both(&format!("apply --recursive -f {dir}")).await;
    assert!(
        output.starts_with("configmap/settings configured\n") && output.contains("data unchanged"),
        "{output}"
    );
    assert!(error.unwrap().contains("DIR/app/web/config/wrong.yaml"));
    std::fs::remove_file(top.join("web/config/wrong.yaml")).unwrap();
    assert_eq!(
        fixture.run(&format!("delete -R -f {dir} --wait=false")).await.unwrap(),
        "persistentvolumeclaim \"data\" deleted\npod \"web\" deleted\nconfigmap \"settings\" deleted\n"
    );
}

#[test]
fn directories_need_files() {
    let words = ["hawser-kubelet", "delete", "-R", "pod", "web"];
    let error = Cli::try_parse_from(words).unwrap_err().to_string();
    assert!(error.contains("'--recursive' cannot be used with '[KIND]'"), "{error}");
}
