//! A server's answer to a call whose caller waits no longer: DEADLINE_EXCEEDED, as the gRPC
//! specification has it. tonic itself answers CANCELLED. A client that receives this before its own
//! timer has run out reports a call that was given up.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tonic::Status;
use tonic::codegen::{Service, http};

/// How long the caller waits, from the call on ("Timeout" of the gRPC specification, PROTOCOL-HTTP2).
const TIMEOUT: &str = "grpc-timeout";
/// The specification's limit.
const DIGITS: usize = 8;

/// The layer around all services of a server.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines;

impl<S> tower::Layer<S> for Deadlines {
    type Service = WithDeadline<S>;

    fn layer(&self, inner: S) -> WithDeadline<S> {
        WithDeadline(inner)
    }
}

#[derive(Debug, Clone)]
pub struct WithDeadline<S>(S);

impl<S, B, R> Service<http::Request<B>> for WithDeadline<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>>,
    S::Future: Send + 'static,
    R: Default,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    /// tonic's timer wakes the call at its deadline, which begins later than the one here. So the
    /// answer is from here, and no second timer is needed.
    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let begun = Instant::now();
        let timeout = request.headers().get(TIMEOUT).and_then(|value| parse(value.as_bytes()));
        let mut answer = Box::pin(self.0.call(request));
        let Some(timeout) = timeout else { return answer };
        Box::pin(std::future::poll_fn(move |context| match answer.as_mut().poll(context) {
            Poll::Pending if begun.elapsed() >= timeout => {
                let message = format!("the caller's deadline of {timeout:?} has passed");
                Poll::Ready(Ok(Status::deadline_exceeded(message).into_http()))
            }
            polled => polled,
        }))
    }
}

/// `20m` is 20 milliseconds. None: not of the specification's form.
fn parse(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > DIGITS || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count = std::str::from_utf8(digits).ok()?.parse().ok()?;
    match unit {
        b'H' => Some(Duration::from_secs(count * 60 * 60)),
        b'M' => Some(Duration::from_secs(count * 60)),
        b'S' => Some(Duration::from_secs(count)),
        b'm' => Some(Duration::from_millis(count)),
        b'u' => Some(Duration::from_micros(count)),
        b'n' => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::{Pending, pending};
    use std::task::Waker;

    use tonic::Code;
    use tower::Layer;

    use super::*;

    struct Silent;

    impl Service<http::Request<()>> for Silent {
        type Response = http::Response<()>;
        type Error = Infallible;
        type Future = Pending<Result<http::Response<()>, Infallible>>;

        fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _request: http::Request<()>) -> Self::Future {
            pending()
        }
    }

    /// The answer's code at the first poll of a call that does not end.
    fn first_poll(timeout: &str) -> Poll<Code> {
        let request = http::Request::builder().header(TIMEOUT, timeout).body(()).unwrap();
        let mut call = Deadlines.layer(Silent).call(request);
        let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        polled.map(|answer| Status::from_header_map(answer.unwrap().headers()).unwrap().code())
    }

    #[test]
    fn a_call_is_refused_once_its_deadline_has_passed() {
        assert_eq!(first_poll("0n"), Poll::Ready(Code::DeadlineExceeded));
        assert_eq!(first_poll("1H"), Poll::Pending);
        assert_eq!(first_poll("soon"), Poll::Pending);
    }

    #[test]
    fn timeouts_are_those_of_the_specification() {
        let units =
            ["2H", "2M", "2S", "2m", "2u", "2n"].map(|value| parse(value.as_bytes()).unwrap().as_nanos());
        assert_eq!(units, [7_200_000_000_000, 120_000_000_000, 2_000_000_000, 2_000_000, 2_000, 2]);
        assert_eq!(parse(b"99999999H").map(|timeout| timeout.as_secs()), Some(99_999_999 * 3600));
        for wrong in ["", "m", "5", "5s", "-5m", "+5m", " 5m", "123456789m"] {
            assert_eq!(parse(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
