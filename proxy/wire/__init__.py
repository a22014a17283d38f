"""HTTP/1.1 connections to clients and workers."""
