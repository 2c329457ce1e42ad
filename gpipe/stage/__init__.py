"""Stages: layers, their boundaries and what they hold."""
