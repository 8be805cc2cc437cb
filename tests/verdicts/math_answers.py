r"""Answers to questions of mathematics, and whether a person accepts them.

Each row is `(key, answer, accepted, note)`, as data sets and models write them: MATH (LaTeX without dollar signs),
GSM8K (money, units), AMC and AIME (integers, letters), text. A note that begins with `taste` marks a row on which
persons differ; the row then states what the scorer does, and the note says why.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    key: str
    answer: str
    accepted: bool
    note: str = ""


def _rows(key: str, right: tuple[str, ...], wrong: tuple[str, ...], note: str = "") -> tuple[Row, ...]:
    return (*(Row(key, answer, True, note) for answer in right), *(Row(key, answer, False, note) for answer in wrong))


NUMBERS = (
    *_rows(
        "7", ("7", "7.0", "7.", "+7", "$7$", "\\boxed{7}", "x = 7", "$x=7$", "14/2", "\\frac{14}{2}", "{7}", "007"), ()
    ),
    *_rows(
        "7",
        (),
        ("7x", "7!", "8, 7", "7, 8", "-7", "7i", "7\\pi", "7^2", "70", "77", "7 or 8", "7\\sqrt{2}", "$7$ or $8$"),
    ),
    *_rows(
        "5",
        ("5", "\\sqrt{25}", "2+3", "5 cm", "5\\text{ cm}", "5 \\mathrm{cm}^2", "5 m"),
        ("5i", "5!", "0.5", "5\\%5", "5t"),
    ),
    *_rows("12", ("12", "3 \\times 4", "3\\cdot 4", "3*4"), ("1 2 3 12", "12, 13", "1, 2, 3, 12", "12^{12}", "1 2")),
    *_rows("-5", ("-5", "\u22125", "$-5$", "-5.0"), ("5", "--5x")),
    *_rows("1000", ("1,000", "1000", "1{,}000", "1\\,000", "1 000", "10^3", "10^{3}", "1e3"), ("1,00", "1.000", "100")),
    *_rows("1,234,567", ("1234567", "1,234,567", "1 234 567"), ("1234", "1,234")),
    *_rows("0.5", ("1/2", ".5", "\\frac12", "\\dfrac{1}{2}", "0.50"), ("5", "0.05", "2")),
    *_rows(
        "\\frac{3}{4}",
        ("0.75", "3/4", "\\frac{6}{8}", "\\tfrac{3}{4}", "$\\frac34$"),
        ("\\frac{4}{3}", "3", "4", "-3/4"),
    ),
    *_rows("3\\frac{1}{2}", ("3.5", "7/2", "3 1/2", "3\\frac12"), ("3/2", "3", "3 1/3", "31/2")),
    *_rows("-2\\frac{1}{3}", ("-7/3",), ("-5/3", "7/3")),
    *_rows("0.\\overline{3}", ("1/3", "0.\\overline{3}", "0.\\bar{3}"), ("0.3", "3")),
    *_rows("3.14159", ("3.14159",), ("3.15", "3")),
    *_rows("2^{10}", ("1024", "2^{10}", "2^10", "2**10"), ("2", "20", "10")),
    *_rows("10!", ("3628800", "10!"), ("10",)),
    *_rows("5!", ("120", "5!"), ("5",)),
    *_rows("1.5 \\times 10^{-3}", ("0.0015", "1.5e-3", "1.5*10^-3"), ("1.5", "1500", "15")),
    *_rows("\\binom{5}{2}", ("10",), ("5", "2")),
    *_rows("\\log_2 8", ("3", "\\log_{2}{8}", "log_2(8)"), ("8", "2")),
    *_rows(
        "204",
        ("204", "\\boxed{204}", "The answer is 204.", "Answer: 204", "**204**", "$\\boxed{204}$"),
        ("024", "20", "2040"),
    ),
)
ALGEBRA = (
    *_rows("3\\sqrt{2}", ("$3\\sqrt{2}$", "3 \\sqrt 2", "\\boxed{3\\sqrt2}", "3\\sqrt{2}", "\\sqrt{18}", "3*sqrt(2)", "3\u221a2"), ()),
    *_rows("3\\sqrt{2}", (), ("3", "2", "\\sqrt{2}", "3\\sqrt{3}", "3, 2", "3+\\sqrt{2}")),
    *_rows("$3\\sqrt{2}$", ("3\\sqrt{2}", "3\\sqrt2"), ("3",)),
    *_rows("16\\sqrt{3}+8\\pi", ("8\\pi + 16\\sqrt{3}", "$8(2\\sqrt3+\\pi)$"), ("16", "8", "16\\sqrt{3}")),
    *_rows("2\\pi", ("$2\\pi$", "2\\pi", "2 pi", "2\u03c0", "\\pi+\\pi"), ("2", "\\pi", "6.28")),
    *_rows("2x+3", ("$2x+3$", "3+2x", "2x + 3", "2 \\cdot x+3"), ("2x", "3", "2", "2y+3", "2x-3")),
    *_rows("y=2x+1", ("$y=1+2x$", "y = 2x+1", "2x+1", "y-2x=1"), ("y=2x-1", "x=2y+1", "1", "2")),
    *_rows("x^2+2x+1", ("(x+1)^2", "x^{2} + 2x + 1"), ("x^2+1", "(x-1)^2", "(x+1)^3")),
    *_rows("(x-1)(x+2)", ("x^2+x-2", "(x+2)(x-1)"), ("(x+1)(x-2)", "1", "-2")),
    *_rows("\\frac{x+1}{2}", ("(x+1)/2", "\\frac{x}{2}+\\frac{1}{2}"), ("x+1/2", "\\frac{x}{2}")),
    *_rows("2^{n}", ("2^n",), ("2", "n", "2n")),
    *_rows("2t", ("2t", "t+t"), ("2", "2x")),
    *_rows("3+4i", ("$4i+3$", "3 + 4i"), ("3", "4", "3-4i", "7", "7i")),
    *_rows("2i", ("(1+i)^2", "$2i$"), ("2", "-2i")),
    *_rows("e^{2}", ("e^2",), ("2", "e")),
    *_rows("\\frac{\\sqrt{3}}{2}", ("\\sqrt{3}/2", "\\frac12\\sqrt3", "sqrt(3)/2"), ("\\sqrt{3}", "3/2", "\\frac{\\sqrt{2}}{3}")),
    *_rows("\\ln 2", ("\\ln(2)", "ln 2"), ("2", "\\ln 3")),
    *_rows("1 - \\frac{1}{e}", ("\\frac{e-1}{e}",), ("1", "\\frac{1}{e}")),
    *_rows("\\sin x", ("\\sin(x)", "sin(x)"), ("\\cos x", "x")),
)  # fmt: skip
SEVERAL = (
    *_rows("2,3", ("3,2", "2, 3", "$2,3$", "$2$ and $3$", "2 and 3", "x=2, x=3", "x=2 or x=3", "\\{2,3\\}"), ()),
    *_rows("2,3", (), ("2", "3", "2.3", "23", "2, 4", "1, 2, 3")),
    *_rows("\\pm 3", ("3, -3", "-3, 3", "\u00b13", "x=3 or x=-3"), ("3", "-3")),
    *_rows("-1, 0, 1", ("1, 0, -1", "\\{-1,0,1\\}"), ("0", "1, 0", "-1")),
    *_rows("(2,3)", ("$(2,3)$", "(2, 3)", "\\left(2, 3\\right)", "(x,y)=(2,3)"), ("(3,2)", "2", "[2,3]", "(2,3,4)")),
    *_rows("(3,2)", ("(3, 2)", "(6/2, 2)"), ("(2,3)", "(5,1)", "(4,2)")),
    *_rows("(1,2,3)", ("(1, 2, 3)",), ("(3,2,1)", "(1,2)", "6")),
    *_rows("\\{1,2\\}", ("\\{2,1\\}", "{1, 2}"), ("\\{1\\}", "\\{1,2,3\\}", "12")),
    *_rows("(1,2),(3,4)", ("(3,4), (1,2)",), ("(1,2)", "(3,4)", "(1,4),(3,2)")),
    *_rows("[1,2)", ("$[1,2)$", "1 \\le x < 2", "\\left[1,2\\right)"), ("(1,2]", "[1,2]", "(1,2)", "1")),
    *_rows("(-\\infty, 3]", ("x \\le 3", "(-\\infty,3]", "(-\u221e, 3]"), ("(-\\infty, 3)", "x<3", "3")),
    *_rows("[1,2] \\cup [3,4]", ("[3,4] \\cup [1,2]",), ("[1,2]", "[1,4]", "[1,2] \\cap [3,4]")),
    *_rows("x>3", ("x > 3", "3 < x", "(3,\\infty)"), ("x<3", "x \\ge 3", "3")),
    *_rows("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", ("\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"), ("\\begin{pmatrix}1&2\\\\4&3\\end{pmatrix}", "1", "\\begin{pmatrix}1\\\\3\\end{pmatrix}")),
    *_rows("3:4", ("3:4", "6:8"), ("4:3", "3")),
)  # fmt: skip
UNITS = (
    *_rows("18", ("$18", "\\$18", "18 dollars", "$18.00", "18", "The answer is $18.", "18 apples", "18 miles per hour"), ("$180", "$1.8")),
    *_rows("\\$1,250", ("1250", "$1,250", "1,250 dollars"), ("1", "250", "1,25")),
    *_rows("50\\%", ("50%", "$50\\%$", "50 percent", "0.5", "1/2"), ("5\\%", "500", "0.05")),
    *_rows("50\\%", ("50",), (), "taste: math-verify takes a percentage also by its number, because keys often omit the sign"),
    *_rows("90^\\circ", ("90", "90\u00b0", "$90^\\circ$", "90 degrees", "90^{\\circ}"), ("9", "0", "180^\\circ")),
    *_rows("5 cm", ("5", "5 \\text{ cm}", "5cm", "5 centimeters"), ("50", "6 cm")),
    *_rows("5 cm", ("5 m",), (), "taste: units are not compared, because most keys have none"),
    *_rows("24 \\text{ square units}", ("24", "24 square units"), ("242", "12")),
    *_rows("12:30", ("12:30", "12:30 p.m."), ("2:5", "12:31", "12")),
    *_rows("1011_2", ("1011_2", "1011_{2}"), ("11", "1011_3", "1010_2")),
    *_rows("1011_2", ("1011",), (), "taste: the question states the base"),
)  # fmt: skip
TEXTS = (
    *_rows("C", ("C", "C.", "(C)", "Option C", "\\text{C}", "**C**", "The answer is C.", "\\boxed{C}", "c", "C)", "$\\text{(C)}$", "Answer: (C)"), ()),
    *_rows("C", (), ("A or B", "A or C", "ABCD", "not C", "B", "D", "C and D", "C, D", "3C", "C or D", "Carbon", "")),
    *_rows("\\textbf{(C)}", ("C", "(C)", "\\textbf{(C)}"), ("B", "ABC")),
    *_rows("A", ("A", "(A)"), ("not A", "A or B", "ABCD", "B. A", "Option B")),
    *_rows("C", (), ("C. Paris",), "taste: a letter with a text could be any option with a wrong letter"),
    *_rows("\\text{Evelyn}", ("Evelyn", "\\text{Evelyn}", "evelyn", "The answer is Evelyn."), ("Carla", "Eve", "not Evelyn", "E")),
    *_rows("Friday", ("Friday", "friday", "\\text{Friday}", "Friday."), ("Monday", "day Fri", "Fridays or Mondays", "F")),
    *_rows("even", ("even", "\\text{even}", "Even"), ("odd", "neve", "not even")),
    *_rows("no solution", ("No solution", "\\text{no solution}"), ("solution", "0")),
    *_rows("yes", ("Yes", "yes.", "\\text{Yes}"), ("no", "sey")),
    *_rows("7", (), ("I do not know", "", "seven or eight", "?", "\\frac", "7^", "not 7")),
)  # fmt: skip
MORE = (
    *_rows("42", ("We have 3+4=7 apples, and 6*7. So the final number is 42.", "Step 1: 40. Step 2: 42", "so it is \\boxed{42}"), ()),
    *_rows("\\frac{1}{2}", ("Thus the probability is $\\frac{1}{2}$.",), ()),
    *_rows("x \\in [-2,7]", ("[-2,7]",), ()),
    *_rows("[-2,7]", ("x \\in [-2,7]",), ()),
    *_rows("\\frac{\\pi}{4}", ("\\dfrac{\\pi}{4}",), ()),
    *_rows("11\\sqrt2", ("11\\sqrt{2}",), ()),
    *_rows("6 - 5i", ("6-5i",), ()),
    *_rows("\\sqrt{51}", ("\\sqrt{51}",), ()),
    *_rows("5x^2-2x+1", ("5x^{2}-2x+1",), ()),
    *_rows("\\left( 3, \\frac{\\pi}{2} \\right)", ("(3,\\frac{\\pi}{2})",), ()),
    *_rows("p - q", ("p-q",), ()),
    *_rows("\\text{(C)}", ("C",), ()),
    *_rows("10,\\!800", ("10800",), ()),
    *_rows("-50", ("-50",), ()),
    *_rows("\\frac{14}{3}", ("14/3",), ()),
    *_rows("1,-2", ("-2,1",), ()),
    *_rows("4x^2+1", ("1+4x^2",), ()),
    *_rows("\\text{June 20}", ("June 20",), ("June 21",)),
    *_rows("\\text{12:05 p.m.}", ("12:05 p.m.",), ()),
    *_rows("$32,\\!348$", ("32348",), ()),
    *_rows("2k+2", ("2(k+1)",), ()),
    *_rows("(-\\infty,0)\\cup(0,\\infty)", ("(0,\\infty)\\cup(-\\infty,0)",), ()),
    *_rows("x=5", ("5",), ()),
    *_rows("5", ("x=5",), ()),
    *_rows("x^3+3x-6", ("x^3+3x-6",), ()),
    *_rows("\\begin{pmatrix} -1/3 \\\\ 2/3 \\\\ 5/3 \\end{pmatrix}", ("\\begin{pmatrix}-\\frac13\\\\\\frac23\\\\\\frac53\\end{pmatrix}",), ()),
    *_rows("\\frac{9}{19}", ("9/19",), ()),
    *_rows("0,1", ("1,0",), ()),
    *_rows("3 \\sqrt{13}", ("3\\sqrt{13}",), ()),
    *_rows("13", ("13 inches", "\\text{13 inches}"), ()),
    *_rows("13 \\text{ inches}", ("13",), ()),
    *_rows("6+9i", ("9i+6",), ()),
    *_rows("70 \\, \\text{degrees}", ("70",), ()),
    *_rows("8 \\text{ minutes}", ("8 minutes",), ()),
    *_rows("\\$2.50", ("2.5",), ()),
    *_rows("1 \\frac{4}{5}", ("9/5",), ()),
    *_rows("k=-3", ("-3",), ()),
    *_rows("2.4 \\times 10^6", ("2400000",), ("2.4",)),
    *_rows("a^2+ab+b^2", ("b^2+ab+a^2",), ()),
    *_rows("ab", ("ba",), ()),
    *_rows("\\tan 20^\\circ", ("\\tan(20^\\circ)",), ()),
    *_rows("\\sqrt[3]{2}", ("2^{1/3}",), ()),
    *_rows("\\lfloor x \\rfloor", ("\\lfloor x \\rfloor",), ()),
    *_rows("f(x)=2x", ("2x",), ()),
    *_rows("y = \\pm \\sqrt{x}", ("y=\\pm\\sqrt{x}",), ()),
    *_rows("1 + 2\\sqrt{3}", ("1+2\\sqrt3",), ()),
    *_rows("\\frac{3-\\sqrt{5}}{2}", ("\\frac{3 - \\sqrt 5}{2}",), ()),
    *_rows("undefined", ("\\text{undefined}",), ()),
    *_rows("i", ("i",), ()),
    *_rows("A=5", ("5",), ()),
    *_rows("5, 6, 7", (), ("5, 6, 7, 8",)),
    *_rows("(0, 9) \\cup (9, 36)", ("(0,9)\\cup(9,36)",), ()),
    *_rows("\\left(\\frac{9}{4},31\\right)", ("(9/4, 31)",), ()),
    *_rows("-\\frac{1}{2}", ("-0.5",), ()),
    *_rows("10", ("10\n", "=10", "\u224810", "\\approx 10", "about 10"), ("ten",)),
    *_rows("7", ("7 + 0x",), ()),
    *_rows("9", ("3^2",), ()),
    *_rows("e^x", ("exp(x)",), ()),
    *_rows("\\emptyset", ("\\varnothing",), ()),
    *_rows("2 \\text{ or } 3", ("2,3",), ()),
    *_rows("16", ("2^4 = 16",), ()),
    *_rows("\\infty", ("infinity",), ()),
    *_rows("-\\infty", (), ("\\infty",)),
    *_rows("101_{2}", ("101",), ()),
    *_rows("\\mathbb{R}", ("\\mathbb{R}",), ()),
    *_rows("25", ("25 students",), ("twenty-five",)),
    *_rows("3/4 cups", ("3/4",), ()),
    *_rows("1.5 hours", ("1.5",), ()),
    *_rows("100", ("100km/h", "100 m^2", "100 cm^2"), ()),
    *_rows("60", ("60 mph",), ()),
    *_rows("$x=2$ and $y=3$", ("x=2, y=3",), ()),
    *_rows("x^4", ("x**4",), ()),
    *_rows("8:00", ("8:00 AM",), ()),
    *_rows("20000", ("$20{,}000",), ()),
    *_rows("4!", ("24",), ()),
    *_rows("\\frac{n(n+1)}{2}", ("n(n+1)/2",), ()),
    *_rows("3.0", ("3",), ()),
    *_rows("\\frac{2}{3}", ("0.666667",), ("0.6667",)),
    *_rows("x < 5", ("(-\\infty,5)",), ()),
    *_rows("|x|", ("\\lvert x\\rvert",), ()),
    *_rows("3", ("\\text{3}", "**3**", "\\textbf{3}", "`3`"), ("# 3",)),
    *_rows("C", ("C. ",), ()),
    *_rows("sin(x)", ("\\sin x",), ()),
    *_rows("2\\cos x", ("2cos(x)",), ()),
    *_rows("xyz", ("xzy",), ()),
    *_rows("[1, 2, 3]", ("[1,2,3]",), ()),
    *_rows("[1,2,3]", ("1,2,3",), ()),
    *_rows("(1, -2)", ("x=1,y=-2",), ()),
    *_rows("0.12", ("12\\%",), ()),
    *_rows("1/3", (), ("33.3\\%",)),
    *_rows("12", ("12\\%", "12 %"), (), "taste: math-verify takes a percentage also by its number, because keys often omit the sign"),
)  # fmt: skip
HARD = (
    *_rows("7", (), ("9**9**9**9", "9^{9^{9^9}}", "$9^{9^{9^{9}}}$", "(10^9)!", "100000000!", "((10!)!)!", "2^{2^{40}}")),
    *_rows("7", (), ("(" * 2000 + "7" + ")" * 2000 + "x", "{" * 4000, "\\frac{1}{" * 300 + "2" + "}" * 300, "9" * 8000, "7" + "+1" * 4000)),
    *_rows("7", (), ("1/0", "\\frac{0}{0}", "\\infty", "nan", "\\boxed{" * 1500, "$" * 8000, "1 " * 4000, "1," * 4000 + "1")),
    *_rows("x+1", (), ("(x+1)^{100000}", "\\sum_{k=1}^{10^{9}} k", "\\int_0^1 x^{x^{x}} dx")),
)  # fmt: skip
"""Answers that are expensive to parse or to compare."""

ROWS = (*NUMBERS, *ALGEBRA, *SEVERAL, *UNITS, *TEXTS, *MORE)
"""Answers of ordinary cost."""
