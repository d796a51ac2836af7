"""Fetching of media by URL or from permitted folders."""
