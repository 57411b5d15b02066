"""TLS towards a worker: from files to a context."""

import ssl
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct


class TLSFiles(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the certificates of a TLS connection lie (PEM files). `cert` and `key` together make it mutual.

    They are read once, when the worker comes into the fleet.
    """

    #: Authorities that may have signed the worker's certificate; None: those that the system trusts.
    ca: str | None = None
    #: Our certificate chain, for a worker that asks for one.
    cert: str | None = None
    #: The private key of `cert`, without a passphrase; None: it lies in the same file.
    key: str | None = None
    #: The name that the worker's certificate must carry; None: the host that is connected to.
    server_name: str | None = None

    def context(self, protocols: Sequence[str]) -> ssl.SSLContext:
        """The client's TLS context: at least TLS 1.2, ALPN for these protocols.

        Raises: `ValueError` naming the field and the file that can't be used.
        """
        if self.key is not None and self.cert is None:
            raise ValueError("tls.key is set but tls.cert is not; mutual TLS needs both")
        for field, path in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            if path is not None and not Path(path).is_file():
                raise ValueError(f"tls.{field}: there is no file {path!r}")
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca)
        except OSError as error:  # of which those of `ssl` are some
            raise ValueError(f"tls.ca: {self.ca!r} holds no usable certificate ({error})") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(list(protocols))
        if self.cert is not None:
            files = repr(self.cert) if self.key is None else f"{self.cert!r} and {self.key!r}"
            try:
                # A passphrase, since without one OpenSSL would ask the terminal for that of an encrypted key.
                context.load_cert_chain(self.cert, self.key, password="")
            except OSError as error:
                raise ValueError(f"tls.cert, tls.key: {files} can't be used ({error})") from error
        return context
