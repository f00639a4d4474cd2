"""Lessons: what a reader of the book does.

exercises/    one file for each exercise: what a student gets, the laws, the mistakes that are known
exercise.py   Exercise, Mistake, Law: what an exercise is
catalogue.py  all exercises in order
references.py the equations written out naively, in loops and float64: what exercises and tests compare with
grading.py    a student's function against its laws, and the likely mistake in words
workbook.py   the student's files: written once, graded in a process apart (trial.py). progress.py: which are solved
models.py     models with weights set by hand, whose heads are known

May import: all rooms from errors to exports, and data.
"""
