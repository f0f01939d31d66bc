"""Bytes and operations of each kernel as functions of its dimensions, and the roofline they give."""
