"""Mutation testing: how many small mistakes in a room's code do the tests of that room notice?"""
