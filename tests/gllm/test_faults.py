"""Which errors of Redis pass, and how long a caller waits for that."""

import ssl
import time

import pytest
import redis.exceptions as errors

from gllm.faults import Patience, is_transient


def because(error: Exception, cause: BaseException) -> Exception:
    """As redis-py wraps what goes wrong while it connects."""
    error.__cause__ = cause
    return error


def during(error: Exception, context: BaseException) -> Exception:
    error.__context__ = context
    return error


def tls(reason: str, kind: type[ssl.SSLError] = ssl.SSLError) -> ssl.SSLError:
    error = kind(1, f"[SSL: {reason}] text (_ssl.c:1)")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (errors.ConnectionError("gone"), True),
        (errors.TimeoutError("late"), True),
        (errors.BusyLoadingError("loading"), True),
        (errors.ReadOnlyError("a replica"), True),
        (errors.MasterDownError("down"), True),
        (errors.ClusterDownError("down"), True),
        (errors.TryAgainError("moving"), True),
        (errors.AskError("7 h:1"), True),
        (errors.MovedError("7 h:1"), True),
        (errors.ResponseError("ASK 7 h:1"), True),
        (errors.ResponseError("MOVED 7 h:1"), True),
        (errors.OutOfMemoryError("full"), True),
        (errors.ResponseError("OOM command not allowed"), True),
        (errors.ResponseError("MISCONF Redis is configured to save"), True),
        (errors.ResponseError("LOADING Redis is loading"), True),
        (errors.ResponseError("BUSY Redis is busy running a script."), True),
        (errors.ResponseError("Command # 1 (SET a b) of pipeline caused error: NOREPLICAS Not enough"), True),
        (errors.ResponseError("Command # 1 (SET a b) of pipeline caused error: ('NOREPLICAS Not enough',)"), True),
        (errors.ResponseError("Command # 1 (SET a\nOOM) of pipeline caused error: ERR syntax"), False),
        (errors.ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"), True),
        (errors.ResponseError("UNBLOCKED client unblocked via CLIENT UNBLOCK"), True),
        (errors.ResponseError("UNBLOCKED the stream key no longer exists"), False),
        (errors.ResponseError("BUSYGROUP Consumer Group name already exists"), False),
        (errors.ResponseError("WRONGTYPE Operation"), False),
        (errors.ResponseError("ERR this has OOM in it"), False),
        (errors.AuthenticationError("WRONGPASS"), False),
        (errors.AuthorizationError("no"), False),
        (errors.NoPermissionError("no"), False),
        (because(errors.ConnectionError("no"), OSError("refused")), True),
        (because(errors.ConnectionError("no"), errors.TimeoutError("late")), True),
        (because(errors.ConnectionError("no"), errors.AuthenticationError("NOAUTH")), False),
        (because(errors.ConnectionError("no"), errors.ResponseError("cluster support disabled")), False),
        (because(errors.ConnectionError("no"), UnicodeError("label too long")), False),
        (during(errors.ConnectionError("no"), errors.NoScriptError("NOSCRIPT")), True),
        (during(errors.ConnectionError("no"), tls("CERTIFICATE_VERIFY_FAILED", ssl.SSLCertVerificationError)), False),
        (during(errors.ConnectionError("no"), tls("WRONG_VERSION_NUMBER")), False),
        (during(errors.ConnectionError("no"), tls("TLSV13_ALERT_CERTIFICATE_REQUIRED")), False),
        (during(errors.ConnectionError("no"), tls("TLSV1_ALERT_INTERNAL_ERROR")), True),
        (during(errors.ConnectionError("no"), tls("UNEXPECTED_EOF_WHILE_READING", ssl.SSLEOFError)), True),
        (ValueError("OOM"), False),
    ],
)
def test_faults_know_what_waiting_may_cure(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient


async def test_patience_ends_and_begins_anew_after_a_success() -> None:
    patience, error = Patience(0.2), errors.ConnectionError("gone")
    started = time.monotonic()

    async def bear() -> None:
        while True:
            await patience.wait(error)

    with pytest.raises(errors.ConnectionError):
        await bear()
    assert 0.2 <= time.monotonic() - started < 2
    patience.reset()
    await patience.wait(error)


async def test_patience_has_none_for_errors_that_stay() -> None:
    with pytest.raises(errors.ResponseError):
        await Patience(60).wait(errors.ResponseError("WRONGTYPE"))
