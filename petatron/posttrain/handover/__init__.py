"""Hands weights over from the layout of training to that of drawing, in memory."""
