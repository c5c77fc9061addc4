"""The sentences of torchgpipe's manual (manual.md), each a test."""
