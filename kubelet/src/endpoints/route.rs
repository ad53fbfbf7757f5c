//! What a request asks for: kubelet's paths (kubernetes, pkg/kubelet/server/server.go).

use hyper::{Method, Uri};

use super::query::{Malformed, Query, segments};

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Route {
    Healthz,
    Pods,
    Metrics,
    ResourceMetrics,
    Summary,
    ContainerLogs(Container, Query),
    Exec(Container, Query),
    Attach(Container, Query),
    PortForward(Pod, Query),
}

/// The pod that a path names. The names are the client's: they only select an object of the store.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pod {
    pub(super) namespace: String,
    pub(super) name: String,
    /// If the path has it, the pod must have this one.
    pub(super) uid: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Container {
    pub(super) pod: Pod,
    pub(super) name: String,
}

/// Why a request is for nothing.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoRoute {
    #[error("404 page not found")]
    NotFound,
    #[error("405: Method Not Allowed")]
    Method,
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

impl Route {
    pub(super) fn of(method: &Method, uri: &Uri) -> Result<Self, NoRoute> {
        let segments = segments(uri)?;
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        let query = || Query::of(uri);
        let route = match segments[..] {
            ["healthz"] => Self::Healthz,
            ["pods"] => Self::Pods,
            ["metrics"] => Self::Metrics,
            ["metrics", "resource"] => Self::ResourceMetrics,
            ["stats", "summary"] => Self::Summary,
            ["containerLogs", namespace, pod, container] => {
                Self::ContainerLogs(self::container(namespace, pod, None, container), query()?)
            }
            ["exec", namespace, pod, container] => {
                Self::Exec(self::container(namespace, pod, None, container), query()?)
            }
            ["exec", namespace, pod, uid, container] => {
                Self::Exec(self::container(namespace, pod, Some(uid), container), query()?)
            }
            ["attach", namespace, pod, container] => {
                Self::Attach(self::container(namespace, pod, None, container), query()?)
            }
            ["attach", namespace, pod, uid, container] => {
                Self::Attach(self::container(namespace, pod, Some(uid), container), query()?)
            }
            ["portForward", namespace, pod] => Self::PortForward(self::pod(namespace, pod, None), query()?),
            ["portForward", namespace, pod, uid] => {
                Self::PortForward(self::pod(namespace, pod, Some(uid)), query()?)
            }
            _ => return Err(NoRoute::NotFound),
        };
        let is_allowed = *method == Method::GET || (route.is_upgrade() && *method == Method::POST);
        if is_allowed { Ok(route) } else { Err(NoRoute::Method) }
    }

    /// Whether the connection carries streams after the answer.
    pub(super) fn is_upgrade(&self) -> bool {
        matches!(self, Self::Exec(..) | Self::Attach(..) | Self::PortForward(..))
    }

    /// The path without its names, for metrics.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Healthz => "healthz",
            Self::Pods => "pods",
            Self::Metrics => "metrics",
            Self::ResourceMetrics => "metrics/resource",
            Self::Summary => "stats/summary",
            Self::ContainerLogs(..) => "containerLogs",
            Self::Exec(..) => "exec",
            Self::Attach(..) => "attach",
            Self::PortForward(..) => "portForward",
        }
    }
}

fn pod(namespace: &str, name: &str, uid: Option<&str>) -> Pod {
    Pod { namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.map(str::to_owned) }
}

fn container(namespace: &str, pod: &str, uid: Option<&str>, name: &str) -> Container {
    Container { pod: self::pod(namespace, pod, uid), name: name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(method: Method, uri: &str) -> Result<&'static str, NoRoute> {
        Route::of(&method, &uri.parse().unwrap()).map(|route| route.label())
    }

    #[test]
    fn kubelets_paths_are_known() {
        for (uri, expected) in [
            ("/healthz", "healthz"),
            ("/pods", "pods"),
            ("/pods/", "pods"),
            ("/metrics", "metrics"),
            ("/metrics/resource", "metrics/resource"),
            ("/stats/summary", "stats/summary"),
            ("/containerLogs/default/web/app?tailLines=1", "containerLogs"),
            ("/exec/default/web/app?command=ls", "exec"),
            ("/exec/default/web/0a1b/app", "exec"),
            ("/attach/default/web/app", "attach"),
            ("/portForward/default/web", "portForward"),
            ("/portForward/default/web/0a1b", "portForward"),
        ] {
            assert_eq!(label(Method::GET, uri), Ok(expected), "{uri}");
        }
        assert_eq!(label(Method::POST, "/exec/default/web/app"), Ok("exec"));
        assert_eq!(label(Method::POST, "/pods"), Err(NoRoute::Method));
        assert_eq!(label(Method::DELETE, "/exec/default/web/app"), Err(NoRoute::Method));
    }

    #[test]
    fn paths_that_lead_elsewhere_are_unknown() {
        for uri in ["/", "/etc/passwd", "/containerLogs/default/web/app/..", "/containerLogs/../x", "/exec"] {
            assert_eq!(label(Method::GET, uri), Err(NoRoute::NotFound), "{uri}");
        }
    }
}
