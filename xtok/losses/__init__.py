"""Losses."""

from xtok.losses._config import PKLConfig as PKLConfig
from xtok.losses._p_kl import p_kl as p_kl
