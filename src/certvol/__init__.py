"""Labelled source images, unlabelled target images, a classifier for the target with a certainty per image."""
