"""Looks like a library that lies beside the script."""

from fastmetrics.core import push
