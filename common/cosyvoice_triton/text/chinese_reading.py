"""What the Chinese grammar misreads: telephone and order numbers, dates, clock times, ranges, scores, money, units."""

import re

from cosyvoice_triton.text.numbers import LONGEST, chinese, chinese_digits, reader

_N = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_ND = rf"{_N}(?:\.\d+)?"
_DASH = r"\s?(?:[-~～〜–—]+|--)\s?"
_FIRST = r"(?<![\d.,])"

_SIGNS = {
    "¥": "元",
    "￥": "元",
    "$": "美元",
    "US$": "美元",
    "HK$": "港元",
    "NT$": "新台币",
    "A$": "澳元",
    "C$": "加元",
    "CA$": "加元",
    "AU$": "澳元",
    "S$": "新加坡元",
}
_SIGNS |= {"€": "欧元", "£": "英镑", "₩": "韩元", "₽": "卢布", "₹": "卢比", "RMB": "元", "CNY": "元", "USD": "美元"}
_SIGN = "|".join(re.escape(sign) for sign in sorted(_SIGNS, key=len, reverse=True))
_SAME_UNIT = "元|块钱|块|美元|美金|港元|港币|欧元|英镑|日元"
_SCALE = "[十百千万亿]+"
_CODES = {"USD": "美元", "RMB": "元人民币", "CNY": "元", "EUR": "欧元", "HKD": "港元", "JPY": "日元", "GBP": "英镑"}

_UNITS = {
    "GB": "GB", "MB": "MB", "TB": "TB", "KB": "KB", "Mbps": "Mbps", "Gbps": "Gbps", "km²": "平方公里", "km2": "平方公里", "m²": "平方米", "m2": "平方米", "㎡": "平方米",
    "cm²": "平方厘米", "cm2": "平方厘米", "m³": "立方米", "m3": "立方米", "cm³": "立方厘米", "km": "公里", "cm": "厘米", "mm": "毫米",
    "nm": "纳米", "μm": "微米", "m": "米", "kg": "公斤", "mg": "毫克", "g": "克", "t": "吨", "ml": "毫升", "mL": "毫升", "L": "升",
    "l": "升", "kWh": "千瓦时", "kW": "千瓦", "MW": "兆瓦", "W": "瓦", "V": "伏", "mAh": "毫安时", "Hz": "赫兹", "kHz": "千赫",
    "MHz": "兆赫", "GHz": "吉赫", "ms": "毫秒", "s": "秒", "min": "分钟", "h": "小时", "dB": "分贝", "kcal": "千卡", "Pa": "帕",
    "hPa": "百帕", "kPa": "千帕", "rpm": "转每分钟", "°": "度",
    "dl": "分升", "dL": "分升", "μg": "微克", "mmol": "毫摩尔", "mol": "摩尔", "N": "牛", "J": "焦", "kJ": "千焦", "A": "安", "mA": "毫安",
    "Ω": "欧", "mmHg": "毫米汞柱", "ha": "公顷", "fps": "帧每秒", "bpm": "次每分钟", "in": "英寸",
}  # fmt: skip
_UNIT = "|".join(re.escape(unit) for unit in sorted(_UNITS, key=len, reverse=True))
_MEASURE = (
    "个|位|本|张|只|条|件|杯|瓶|辆|台|把|块|间|家|次|遍|趟|种|名|人|天|周|年|小时|分钟|秒|岁|倍|斤|公斤|千克|克|吨|升|毫升|"
    "米|公里|千米|厘米|毫米|平方|立方|元|美元|欧元|英镑|港元|万|亿|千|百|篇|部|首|场|节|份|颗|棵|朵|头|匹|双|对|套|层|座|架|艘|支|枚|"
    "束|串|碗|盘|盒|包|袋|箱|桶|片|粒|句|段|页|项|道|门|所|户|届(?!)|点钟|刻钟|季(?!度)|岁半|晚|夜|代(?!)|股|批|组(?!)|枝|根|顿|幅|滴|口|尺|亩"
)
_NOT_COUNTED = "(?:[楼号月日环路]|年级|年代)"

_WEB = re.compile(
    r"(?:https?://|www\.)[^\s\u4e00-\u9fff，。！？；：]+|[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z][\w-]*(?:\.[A-Za-z][\w-]*)+(?:/\S*)?",
    re.ASCII,
)
_ROMAN = {chr(0x2160 + index): index + 1 for index in range(12)}


def number(digits: str) -> str:
    """Return the words of a whole or decimal number; of a longer one, and after a leading zero, its digits."""
    whole, _, decimals = digits.replace(",", "").partition(".")
    spelled = len(whole) > LONGEST or (len(whole) > 1 and whole.startswith("0"))
    words = chinese_digits(whole) if spelled else chinese(int(whole or 0))
    return words + (f"点{chinese_digits(decimals)}" if decimals else "")


def counted(digits: str) -> str:
    """Return `number` before a measure word: 两 for 2."""
    return "两" if digits == "2" else number(digits)


def _spelled(match: re.Match[str]) -> str:
    return chinese_digits(match[0])


def _date(match: re.Match[str]) -> str:
    return f"{chinese_digits(match[1])}年{chinese(int(match[3]))}月{chinese(int(match[4]))}日"


def _clock(hour: str, minute: str) -> str:
    hours = "两" if int(hour) == 2 else chinese(int(hour))
    if not int(minute):
        return f"{hours}点" if int(hour) else "零点"
    return f"{hours}点{'零' if minute[0] == '0' else ''}{chinese(int(minute))}分"


def _seconds(match: re.Match[str]) -> str:
    if not int(match[3]):
        return _clock(match[1], match[2])
    return _clock(match[1], match[2]) + f"{'零' if match[3][0] == '0' else ''}{chinese(int(match[3]))}秒"


def _money(match: re.Match[str]) -> str:
    sign, minus, digits, scale = match[1], match[2] or "", match[3].removesuffix(".00"), match[4] or ""
    amount = counted(digits) if not scale else number(digits).replace("二", "两") if digits == "2" else number(digits)
    return ("负" if minus else "") + amount + scale + _SIGNS[sign]


def _money_range(match: re.Match[str]) -> str:
    return f"{number(match[2])}到{number(match[3])}{match[4] or ''}{_SIGNS[match[1]]}"


def _percent_range(match: re.Match[str]) -> str:
    return f"百分之{number(match[1])}到百分之{number(match[2])}"


def _share(sign: str) -> str:
    return {"%": "百分之", "‰": "千分之"}[sign]


def _before_measure(match: re.Match[str]) -> str:
    return f"{counted(match[1])}到{counted(match[2])}"


def _unit(match: re.Match[str]) -> str:
    amount = number(match[1]) + match[2] if match[2] else counted(match[1])
    return amount + _UNITS[match[3]] + (f"每{_UNITS[match[4]]}" if match[4] else "")


def _thousands(digits: str) -> str:
    return number(f"{float(digits.replace(',', '')) * 1000:.0f}")


def _plus(match: re.Match[str]) -> str:
    return "加" if "=" in match.string or match[1].isdigit() and match[2].isdigit() else match[0]


def _power(match: re.Match[str]) -> str:
    exponent = match[1].replace("-", "负")
    return (
        "的"
        + ({"2": "平", "3": "立"}.get(exponent) or re.sub(r"\d+", lambda digits: number(digits[0]), exponent) + "次")
        + "方"
    )


def _fraction(match: re.Match[str]) -> str:
    if match[1]:
        return f"{number(match[1])}又{number(match[3])}分之{number(match[2])}"
    return f"{number(match[3])}分之{number(match[2])}"


def _attached(match: re.Match[str]) -> str:
    """Read digits that touch Latin letters: a model or a train by its digits, a short one as a number."""
    digits = match[0]
    return chinese_digits(digits) if len(digits) > 2 or digits.startswith("0") else chinese(int(digits))


_CALL = r"(?:拨打|致电|呼叫|急救|报警|火警|热线|客服|拨|打(?:电话)?(?:给)?|电话(?:号码)?(?:是|为|：|:)?|或|、|和)"
_ID = (
    r"(?:[验证校邀]+[证验请]?码|密码|编码|代码|号码|条码|口令|编号|单号|卡号|账号|帐号|工号|学号|车牌号?|尾号|证号|邮编|群号?|QQ|"
    r"后[三四五六]位|取件码|订单|快递|航班|车次)(?:号)?(?:是|为|：|:|\s)*\s?"
)
_EVENT = "事件|大促|晚会|购物节|恐袭|袭击|运动|地震|阅兵|狂欢"


def _duration_of(hours: str, minutes: str, seconds: str) -> str:
    whole = f"{counted(str(int(hours)))}小时" if int(hours) else ""
    return f"{whole}{chinese(int(minutes))}分{chinese(int(seconds))}秒"


def _with_two(digits: str) -> str:
    words = number(digits)
    return "二" + words[1:] if words.startswith("两") else words


def _degrees(minus: str, digits: str, unit: str) -> str:
    fahrenheit = "华氏" if unit in ("°F", "℉") else ""
    whole = {"": "", "摄氏度": "摄氏度"}.get(unit, "度")
    return ("零下" if minus else "") + fahrenheit + (counted(digits) if unit else number(digits)) + whole


_read = reader(
    (r"[Ⅰ-Ⅻ]", [
    (r"[Ⅰ-Ⅻ]", lambda match: chinese(_ROMAN[match[0]], "二")),
    ]),
    # Numbers that are said digit by digit.
    (r"\d{3}|\d\D\d|后", [
    (r"(血压\D{0,6}?)(\d{2,3})/(\d{2,3})(?!\d)(\s?mmHg)?",
     lambda match: f"{match[1]}{number(match[2])}，{number(match[3])}{'毫米汞柱' if match[4] else ''}"),
    (r"(?<![\d.])\+?(?:86[- ]?)?1[3-9]\d[- ]?\d{4}[- ]?\d{4}(?![\d.])", _spelled),
    (r"(?<![\d.])(?<!\d )[(（]?0\d{2,3}[)）]?[- ]?\d{3,4}[- ]?\d{4}(?!\d)", _spelled),
    (r"(?<![\d.])(?:400|800)[- ]\d{3,4}[- ]\d{3,4}(?!\d)", _spelled),
    (rf"({_CALL}\s?)(1\d{{2}}|9\d{{2}}|1\d{{4}}|9\d{{4}})(?!\d|[.,]\d|\s?(?:元|块|个|人|万|亿|次|分|%|年|天|岁|折|斤))",
     lambda match: match[1] + chinese_digits(match[2])),
    (r"(?<![\d.])\+\d{1,3}(?:[ -]\(?\d{1,4}\)?){2,}(?!\d)", lambda match: "加" + _spelled(match)),
    (r"(?<![A-Za-z\d.-])(?!\d{4}-\d\d?-\d\d?(?!\d))\d{1,12}(?:-\d{1,12}){2,9}(?![\w-])|(?<![\d.])\d{4}(?: \d{4}){2,}(?!\d)",
     lambda match: "，".join(map(chinese_digits, re.split("[- ]", match[0])))),
    (rf"({_ID})(\d{{3,}})(?![\d,.]*\d|[元块个人万亿年月日])", lambda match: match[1] + chinese_digits(match[2])),
    (rf"{_FIRST}\d{{3,4}}(?=(?:号)?(?:房间|房|教室|会议室|病房|包间|包厢|寝室|宿舍|室))", _spelled),
    (r"(?:(?<=[座栋幢])|(?<=单元|号楼))\d{3,4}(?!\d|[.,]\d|[元块个人户万亿米平])", _spelled),
    (rf"{_FIRST}(?:\d{{3,4}}(?=(?:{_EVENT}))|(?:985|211)(?=[、和/高院大名工学硕本])|(?:996|007|404)(?![.\d]|\s?(?:{_MEASURE}|%)))", _spelled),
    (r"(?<=[A-Z]·)\d{3,}(?!\d)", _spelled),
    (r"(?<=[A-Z] )\d{4}(?![\d.,]*\d|\s?[年万亿元人个台辆])", _spelled),
    (r"(?<![\d.])[05-9][05](?=后(?![退续来面边再]))", _spelled),
    (rf"{_FIRST}\d{{7,}}(?![\d]|,\d|\.\d|[元块个人万亿])", _spelled),
    ]),
    # Dates.
    (r"\d\s?[-/.·年月日号学~～〜—–]", [
    (r"(?<=\d{4}-\d\d-\d\d)T(\d\d:\d\d(?::\d\d)?)(?:\.\d+)?Z?", r" \1"),
    (r"(?<![\d.-])(\d{4})([-/.])(1[0-2]|0?[1-9])\2(3[01]|[12]\d|0?[1-9])(?![.-]?\d)日?", _date),
    (rf"(?<!\d)((?:1\d|20)\d\d)年?{_DASH}((?:1\d|20)\d\d)(?=学?年|财年|赛季)",
     lambda match: f"{chinese_digits(match[1])}{'年' if match.string[match.end()] == '年' else ''}到{chinese_digits(match[2])}"),
    (rf"(?<=\d月){_DASH}(?=\d\d?月)|(?<![\d./-])(1[0-2]|0?[1-9]){_DASH}(?=(?:1[0-2]|0?[1-9])月)",
     lambda match: f"{chinese(int(match[1]))}到" if match[1] else "到"),
    (r"(?<![\d/])(1[0-2]|0?[1-9])/(3[01]|[12]\d|0?[1-9])(?=前(?![\d一二三])|起|截止|当[天日])",
     lambda match: f"{chinese(int(match[1]))}月{chinese(int(match[2]))}日"),
    (rf"(?<=\d[日号]){_DASH}(?=\d\d?[日号])|(?<![\d./-])(3[01]|[12]\d|[1-9]){_DASH}(?=(?:3[01]|[12]\d|[1-9])[日号])",
     lambda match: f"{chinese(int(match[1]))}到" if match[1] else "到"),
    (r"(?<![\d.])(\d{1,2})·(\d{1,2})(?!\d)", _spelled),
    (r"(?<![\d.])[4-9]\d(?=年(?:出?生|毕业|参军|入[伍学党]|结婚|属|高考|[级版款]|的(?:人|车|老)|[春夏秋冬]))", _spelled),
    (r"(公元前|距今)(\d+)(?=年)", lambda match: match[1] + chinese(int(match[2]))),
    (r"(?<![\d.])((?:1\d|20)\d\d)(?=年(?!来|(?:的)?(?:历史|时间|经验|寿命)))", _spelled),
    (r"(?<![\d.])(\d\d)(?=年(?:代|\d{1,2}月))",
     lambda match: chinese(int(match[1])) if match.string[match.end() : match.end() + 2] == "年代" else _spelled(match)),
    (rf"(?<!\d)(1[0-2]|0?[1-9])月(3[01]|[12]\d|0?[1-9])([日号])?{_DASH}(?:(1[0-2]|[1-9])月)?(3[01]|[12]\d|[1-9])(?=[日号])",
     lambda match: f"{chinese(int(match[1]))}月{chinese(int(match[2]))}{match[3] or ''}到"
     + (f"{chinese(int(match[4]))}月" if match[4] else "") + chinese(int(match[5]))),
    (r"(?<!\d)(1[0-2]|0?[1-9])月(?:(3[01]|[12]\d|0?[1-9])(?=[日号]))?",
     lambda match: f"{chinese(int(match[1]))}月" + (chinese(int(match[2])) if match[2] else "")),
    (r"(?<![\d.,])(3[01]|[12]\d|[1-9])(?=[日号](?!元|内|均|常|间))", lambda match: chinese(int(match[1]))),
    ]),
    # Clock times, and the colons that are none.
    (r"\d[点时岁元米页层级天楼]?\s?[:：点~～〜–—-]", [
    (r"(用了?|用时|耗时|历时|成绩是?|时长|仅|以|超过|长达)\s?(\d{1,2}):([0-5]\d):([0-5]\d)(?!\d)",
     lambda match: match[1] + _duration_of(match[2], match[3], match[4])),
    (r"(?<!\d)([01]?\d|2[0-4]):([0-5]\d):([0-5]\d)(?!\d)", _seconds),
    (rf"(?<![\d:])([01]?\d|2[0-4]):([0-5]\d){_DASH}([01]?\d|2[0-4]):([0-5]\d)(?![\d:])",
     lambda match: f"{_clock(match[1], match[2])}到{_clock(match[3], match[4])}"),
    (r"(?:(比[分例为是数][^\W\d]{0,2}|比率|胜|负|平|击败|战胜)\s?)(\d+)(?:[:：]|\s?[-–—]\s?)(\d+)(?![:\d]|\.\d|\s?[%％])",
     lambda match: f"{match[1]}{number(match[2])}比{number(match[3])}"),
    (r"(?<![\d:-])(\d{1,3})(?:[:：]|[-–])(\d{1,3})(?=(?:逆转|获胜|取胜|击败|战胜|大胜|险胜|战平|落败|领先|落后|完胜|不敌|负于|力克|轻取|横扫|淘汰))",
     lambda match: f"{number(match[1])}比{number(match[2])}"),
    (r"(?<![\d:])([01]?\d|2[0-4])[:：]([0-5]\d)(?![:\d])", lambda match: _clock(match[1], match[2])),
    (r"(?<![\d:])(\d+(?:\.\d+)?)[:：](\d+(?:\.\d+)?)(?![:\d])", lambda match: f"{number(match[1])}比{number(match[2])}"),
    (rf"(?<=\d([点时岁元米页层级天楼])){_DASH}(?=\d+\1)", "到"),
    (r"(?<![\d.])2(?=点(?:钟|半|整|多|左右|前|后|到|[^\d十一二三四五六七八九]|$))", "两"),
    (rf"(?<![\d.])([01]?\d|2[0-4]){_DASH}([01]?\d|2[0-4])(?=点)", _before_measure),
    ]),
    # Money.
    (r"[¥￥$€£₩₽₹]|[A-Z]{3}|/|满\d", [
    (rf"({_SIGN})\s?({_ND}){_DASH}(?:{_SIGN})?\s?({_ND})({_SCALE})?(?:{_SAME_UNIT})?", _money_range),
    (rf"({_SIGN})\s?(-)?({_ND})\s?({_SCALE})?(?:{_SAME_UNIT})?", _money),
    (rf"(-)({_SIGN})\s?({_ND})", lambda match: f"负{number(match[3])}{_SIGNS[match[2]]}"),
    (rf"({_ND})\s?({_SCALE})?\s?([€£$])", lambda match: number(match[1]) + (match[2] or "") + _SIGNS[match[3]]),
    (rf"({_ND})\s?({_SCALE})?\s?(USD|RMB|CNY|EUR|HKD|JPY|GBP)(?![A-Za-z])",
     lambda match: number(match[1]) + (match[2] or "") + _CODES[match[3]]),
    (r"满(\d+)-(\d+)(?!\d|[岁周天月年])", lambda match: f"满{number(match[1])}减{number(match[2])}"),
    (r"(?<=[元块角分次件万人GB%])/(人|位|个|天|日|月|年|小时|分钟|秒|次|件|份|斤|公斤|千克|吨|平米?|平方米|晚|间|瓶|盒|张|课时|节|周|米|公里|升|度|kg)",
     lambda match: f"每{_UNITS.get(match[1], match[1])}"),
    ]),
    # Thousands, shares, temperatures, units.
    (r"[%％‰℃℉°度]|\d[万亿千百]?\s?[A-Za-zμµ㎡]", [
    (rf"(?<![A-Za-z\d.])({_ND})[kK]{_DASH}({_ND})[kK](?![A-Za-z\d])", lambda match: f"{_thousands(match[1])}到{_thousands(match[2])}"),
    (rf"(?<![A-Za-z\d.])({_ND})w(?![A-Za-z\d])", lambda match: f"{counted(match[1])}万"),
    (r"(?<![A-Za-z\d.])(\d+)\s?h\s?([0-5]?\d)\s?m?(?:in)?(?![A-Za-z\d])",
     lambda match: f"{counted(match[1])}小时{chinese(int(match[2]))}分钟"),
    (rf"(?<!\d)({_ND})[%％]?{_DASH}({_ND})[%％]", _percent_range),
    (rf"(?<![A-Za-z\d%])-({_ND})([%％‰])", lambda match: f"负{_share('‰' if match[2] == '‰' else '%')}{number(match[1])}"),
    (rf"(?<![\w)])\+(?={_ND}\s?[%％])|(?<=[\u4e00-\u9fff])\+(?={_ND}\s?[%％])", "正"),
    (rf"({_ND})\s?([%％‰])", lambda match: _share("‰" if match[2] == "‰" else "%") + number(match[1])),
    (rf"(?<![\d.])(-?)({_ND})(?:℃|°C|°F|℉|摄氏度|度)?{_DASH}(-?)({_ND})\s?(℃|°C|°F|℉|摄氏度|度)",
     lambda match: f"{_degrees(match[1], match[2], '')}到{_degrees(match[3], match[4], match[5])}"),
    (rf"(?<![\d.])(-?)({_ND})\s?(℃|°C|°F|℉|摄氏度)", lambda match: _degrees(match[1], match[2], match[3])),
    (rf"(?<![\dA-Za-z.])-({_ND})(?=度)", lambda match: _degrees("-", match[1], "")),
    (rf"({_ND})({_DASH})({_ND})\s?({_UNIT})(?![A-Za-z0-9])",
     lambda match: f"{number(match[1])}到{counted(match[3])}{_UNITS[match[4]]}"),
    (rf"(?<![A-Za-z\d.])({_ND})\s?({_SCALE})?\s?({_UNIT})(?:/({_UNIT}))?(?![A-Za-z0-9²³])", _unit),
    ]),
    # Arithmetic.
    (r"[×xX*÷+=≥≤<>≠≈±^²³π√-]", [
    (r"7\s?[×xX*]\s?24(?=\s?(?:小时|$|[，。全]))", "七乘二十四"),
    (r"(?<=[\d米寸尺])\s?[×*]\s?(?=[\d一二三四五六七八九十两])", "乘以"),
    (r"(?<=\d)\s?÷\s?(?=\d)", "除以"), (r"(?<=[\d万])(?<!\D18)(?<!^18)\+(?=[\u4e00-\u9fff]|[，。、；]|$)", "多"),
    (r"(?<=[\w)])\^(-?\d{1,3})", _power), (r"π", "派"),
    (r"(?<=([\da-z²³方)]))\s?\+\s?(?=([\da-z(]))", _plus),
    (r"(?<=[\da-z²³方)])\s?-\s?(?=[\da-z(]{1,6}[²³]?\s?=)", "减"),
    (r"(?<=[\d\w])\s?=\s?(?=[-\d\w])", "等于"),
    (r"\s?(?:≥|>=)\s?(?=[-\d零一二两三四五六七八九十百])", "大于等于"), (r"\s?(?:≤|<=)\s?(?=[-\d零一二两三四五六七八九十百])", "小于等于"),
    (r"\s?>\s?(?=[\d零一二两三四五六七八九十百])", "大于"), (r"\s?<\s?(?=[\d零一二两三四五六七八九十百])", "小于"), (r"√\s?(?=\d)", "根号"),
    (r"[≠]|!=", "不等于"), (r"[≈]\s?", "约等于"), (r"±", "正负"),
    ]),
    # Ranges and fractions.
    (r"第|/|[Nn][Oo]\.|\d\s?[-~～〜–—]", [
    (r"(?<![A-Za-z])[Nn][Oo]\.\s?(\d{1,2})(?!\d)", lambda match: f"第{_with_two(match[1])}"),
    (r"(?<=[图表例式])(\d+)[-–](?=\d)", lambda match: f"{number(match[1])}杠"),
    (rf"第(\d+){_DASH}第?(\d+)", lambda match: f"第{number(match[1])}到第{number(match[2])}"),
    (r"第(\d+)", lambda match: f"第{_with_two(match[1])}"),
    (r"(?<![\d/.])(?:(\d+) )?(\d{1,3})/(\d{1,3})(?![\d/]|\.\d)", _fraction),
    (rf"{_FIRST}({_ND})\s?({_SCALE})?{_DASH}({_ND})(?=\s?(?:{_MEASURE}|多))(?!\s?{_NOT_COUNTED})",
     lambda match: f"{counted(match[1])}{match[2] or ''}到{counted(match[3])}"),
    (rf"(?<![A-Za-z\d.,-])({_ND})({_DASH})({_ND})(?![\d-])",
     lambda match: f"{number(match[1])}到{number(match[3])}"),
    ]),
    # Versions, models, chemistry.
    (r"[A-Za-z]|\.\d+\.|-", [
    (r"(?<![\d.])\d+(?:\.\d+){2,}(?!\d)", lambda match: "点".join(map(number, match[0].split(".")))),
    (r"(?<=[A-Za-z_])\d+(?![\d.]*\d)(?!\.\d)", _attached),
    (r"(?<![\d.,])\d{3,}(?=[A-Z])", _spelled),
    (r"(?<=[A-Za-z零一二三四五六七八九十]-)\d+", _attached),
    ]),
    # Counts: the centimeters of a height after its meters; 两 before a measure word, 二 elsewhere.
    (r"\d", [
    (rf"(?<=(?<![\d.])[12]米)\d\d(?![\d.]|\s?(?:[厘公分秒]|{_MEASURE}))", _spelled),
    (rf"{_FIRST}2(?={_NOT_COUNTED}(?!线))", "二"),
    (rf"{_FIRST}2\s?(?=(?:多)?(?:{_MEASURE}))", "两"),
    (rf"(?:(?<![\w.,%])|(?<=[是为到至低于约得]))-({_ND})", lambda match: f"负{number(match[1])}"),
    (_ND, lambda match: number(match[0])),
    ]),
)  # fmt: skip

_NEEDED = re.compile(r"[\d≥≤≈±≠²³πⅠ-Ⅻ<>=]")  # most texts have nothing that a rule could match


def read_chinese(text: str) -> str:
    """Return `text` with its numbers, and the signs beside them, in words. Addresses of the web stay as they are."""
    if not _NEEDED.search(text):
        return text
    parts, end = [], 0
    for address in _WEB.finditer(text):
        parts += [_read(text[end : address.start()]), address[0]]
        end = address.end()
    return "".join([*parts, _read(text[end:])])
