"""Checks of this machine and installation, for `care doctor`."""
