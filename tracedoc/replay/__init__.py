"""The analysed step as a program that can be played again, unchanged or with a change."""
