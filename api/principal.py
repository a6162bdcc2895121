"""Who calls: what the door knows of a caller once the credential was checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. Handlers get one with every message and never see the credential itself."""

    tenant: str
    subject: str


ANONYMOUS = Principal(tenant="", subject="anonymous")
"""Everyone, while `auth.mode` is "off"."""
