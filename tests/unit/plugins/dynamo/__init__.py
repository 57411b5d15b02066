"""Dynamo's control plane."""
