"""One file for each exercise, named as the function that the student writes. catalogue.py, one floor up, has their order.

In each file: the stub that a student gets, an answer, the cases, and the known mistakes as functions.
"""
