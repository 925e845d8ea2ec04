"""Chinese: how quantities are said, the words around a number that say what it is, and what nobody speaks."""

import re
from decimal import Decimal

from cosyvoice_triton.text.numbers import chinese, chinese_digits, is_spelled
from cosyvoice_triton.text.quantities import Quantity, Reader, is_day
from cosyvoice_triton.text.units import CURRENCIES, UNITS

_HAN = r"\u4e00-\u9fff"
_DASH = r"\s?(?:[-~～〜–—]+)\s?"

# What ends before a number that is said digit by digit, of at least three digits; and what begins after one.
_CODES = (
    "码", "群", "QQ", "ID", "分机", "邮编", "后四位", "后三位", "后六位", "口令", "快递", "航班", "车次", "尾数", "单元", "号楼", "座",
    "栋", "幢", "车牌", "订单",
)  # fmt: skip
_CALLS = (
    "拨打", "致电", "呼叫", "急救", "报警", "火警", "热线", "客服", "拨", "打", "电话", "打给", "号码",
)  # fmt: skip
_ROOMS = ("房", "教室", "会议室", "病房", "包间", "包厢", "寝室", "宿舍", "室", "号房", "号教室", "号会议室", "号病房", "号包", "号宿舍", "号室")
_EVENTS = (
    "事件", "大促", "晚会", "购物节", "恐袭", "袭击", "运动", "地震", "阅兵", "狂欢", "劳动节", "妇女节", "儿童节", "国庆", "青年节",
)  # fmt: skip
_KNOWN = frozenset("985 211 996 007 404 911 618 315 886 666 520 1314 233 110 119 120 12306 12315".split())
_MEASURES = tuple(
    "个 位 本 张 只 条 件 杯 瓶 辆 台 把 块 间 家 次 遍 趟 种 名 人 天 周 年 小时 分 秒 岁 倍 斤 公 千克 克 吨 升 毫 "
    "米 千米 厘米 平方 立方 元 美元 欧元 英镑 港元 万 亿 千 百 篇 部 首 场 节 份 颗 棵 朵 头 匹 双 对 套 层 座 架 艘 支 枚 "
    "束 串 碗 盘 盒 包 袋 箱 桶 片 粒 句 段 页 项 道 门 所 户 点 刻 季 晚 夜 代 股 批 组 枝 根 顿 幅 滴 口 尺 亩 折 款 "
    "多个 多小时 多年 多天 多月 卷 级 期 章 步 班 队 排 行 列 组 英里 英尺 磅 海里 节课 餐 桌 席 笔 封 集 回 轮 天半 岁半".split()
)
_NOT_COUNTED = (
    "楼", "号", "月", "日", "环", "路", "年级", "年代", "线", "季度", "班", "级", "期", "章", "卷", "点零", "点一", "点二", "点三", "点四",
    "点五", "点六", "点七", "点八", "点九", "排", "队", "座", "栋", "单元", "车间",
)  # fmt: skip
_AMOUNTS = ("元", "块", "个", "人", "万", "亿", "年", "月", "日", "次", "%", "％", "岁", "天", "分", "折", "斤", "台", "辆", "米", "平", "户", "多")
_SCORES = ("比分", "总分", "胜", "负", "平", "击败", "战胜", "比例", "比率", "比为", "比是", "国足", "比分是", "比分为", "以")
_WINS = (
    "逆转", "获胜", "取胜", "击败", "战胜", "大胜", "险胜", "战平", "落败", "领先", "落后", "完胜", "不敌", "负于", "力克", "轻取", "横扫",
    "淘汰", "晋级", "告负", "打败", "大比分",
)  # fmt: skip
_LASTED = ("用了", "用", "跑了", "跑出", "用时", "耗时", "历时", "成绩", "成绩是", "时长", "仅", "以", "超过", "长达", "了")
_DATES_BEFORE = ("时间", "日期", "至", "截止", "有效期", "定于", "生日")
_DATES_AFTER = ("前", "起", "截止", "当天", "当日", "去", "出发", "到", "早上", "上午", "下午", "晚", "的会", "的票", "的机票", "有效", "号", "日")
_CLOCK_BEFORE = ("上午", "下午", "早上", "晚上", "凌晨", "中午", "傍晚")
_BORN = re.compile(r"年(?:出?生|毕业|参军|入[伍学党]|结婚|属|高考|[级版款]|的(?:人|车|老)|[春夏秋冬]|\d{1,2}月)")
_LASTING = re.compile(r"年(?:来|的?(?:历史|时间|经验|寿命))")
_GENERATION = re.compile(r"后(?![退续来面边再])")
_SPOKEN_NUMBER = "[零一二两三四五六七八九十百千万点]+"
_LISTED = re.compile(rf"比{_SPOKEN_NUMBER}[、，,;；和]\s?\Z")
_LIST = re.compile(r"[零一二三四五六七八九]{3,}[、，,或和]\s?\Z")
_WAN = re.compile(r"[次人粉个元像播阅用浏下观点+]|多|左右|以上|以内")
_SIGNS = {"-": "负", "+": "正", "±": "正负", "~": "约", "≈": "约"}
_ROMAN = {chr(0x2160 + index): chinese(index + 1) for index in range(12)}
_WEB = re.compile(
    rf"(?:https?://|www\.)[^\s{_HAN}，。！？；：]+|[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z][\w-]*(?:\.[A-Za-z][\w-]*)+(?:/\S*)?",
    re.ASCII,
)

# Signs between numbers and words, in this order: a pattern and what is said.
_RULES = [
    (re.compile(rule), said)
    for rule, said in (
        (r"[Ⅰ-Ⅻ]", lambda found: _ROMAN[found[0]]),
        (r"(?<=\d{4}-\d\d-\d\d)T(\d\d:\d\d(?::\d\d)?)(?:\.\d+)?Z?", r" \1"),
        (r"(?<![A-Za-z])[Nn][Oo]\.\s?(?=\d{1,2}(?!\d))", "第"),
        (r"(?<=[图表例式])(\d+)[-–](?=\d)", r"\1杠"),
        (r"满(\d+)-(?=\d+(?![\d岁周天月年]))", r"满\1减"),
        (rf"(?<=\d([{_HAN}])){_DASH}(?=第?\d+\1)|(?<=\d[月日号]){_DASH}(?=\d+[月日号])", "到"),
        (rf"(?<=[\d万亿千百%][{_HAN}])/(?=[{_HAN}])|(?<=\d[{_HAN}]{{2}})/(?=[{_HAN}])|(?<=\d%)/(?=[{_HAN}])|(?<=\d[A-Za-z]{{2}})/(?=[{_HAN}])", "每"),
        (rf"(?<=[\dwWkK万])(?<!\D18)(?<!^18)\+(?=[{_HAN}]|[，。、；]|$)", "多"),
        (r"(\d[a-z]{0,2}[²³]?)\s?[×*xX]\s?(?=\d)", r"\1乘以"), (rf"(?<=[米寸尺])\s?[×*]\s?(?=[\d{_HAN}])", "乘以"),
        (r"(?<=\d)\s?÷\s?(?=\d)", "除以"), ("π", "派"),
        (r"(?:(?<=(?<![A-Za-z\d万亿千百])[A-Za-z])|(?<=[)]))(?:\^(-?\d{1,3})|([²³]))(?!\d)",
         lambda found: _power(found[1] or {"²": "2", "³": "3"}[found[2]])),
        (r"(?<![\d.])(\d{1,2})·(\d{1,2})(?!\d)", lambda found: chinese_digits(found[0])),
        (r"(?<![A-Za-z\d.])(\d+)\s?h\s?0?([0-5]?\d)\s?m?(?:in)?(?![A-Za-z\d])", r"\1小时\2分钟"),
        (r"(?<=([\da-z方)]))\s?\+\s?(?=([\da-z(]))",
         lambda found: "加" if "=" in found.string or found[1].isdigit() and found[2].isdigit() else found[0]),
        (r"(?<=[\da-z方)])\s?-\s?(?=[\da-z(]{1,6}[²³]?\s?=)|(?<=\b[a-z])-(?=\d+\s?=)", "减"),
        (r"\s?(?:≥|>=)\s?(?=[-\d])", "大于等于"), (r"\s?(?:≤|<=)\s?(?=[-\d])", "小于等于"), (r"≠|!=", "不等于"),
        (rf"(?<=[\w方)°%])\s?=\s?(?=[-\w])", "等于"), (r"\s?>\s?(?=\d)", "大于"), (r"\s?<\s?(?=\d)", "小于"),
        (r"(?<=[A-Z][a-z]{2})\.\s(?=\d)", " "), (r"√\s?(?=\d)", "根号"), (r"≈\s?", "约等于"),
    )
]  # fmt: skip
_NEEDED = re.compile(r"[\d≥≤≈±≠²³πⅠ-Ⅻ<>=]")  # most texts have nothing to read


def _power(exponent: str) -> str:
    return {"2": "平方", "3": "立方"}.get(exponent) or f"的{exponent}次方"


def number(digits: str) -> str:
    """Return the words of a whole or decimal number; of a longer one, and after a leading zero, its digits."""
    whole, _, decimals = digits.partition(".")
    words = chinese_digits(whole) if is_spelled(whole) else chinese(int(whole or 0))
    return words + (f"点{chinese_digits(decimals)}" if decimals else "")


def _counted(digits: str) -> str:
    """Return `number` before a measure word: 两 for 2."""
    return "两" if digits == "2" else number(digits)


def _ordinal(digits: str) -> str:
    return number(digits) if is_spelled(digits) or digits[0] != "2" else chinese(int(digits), "二" if len(digits) > 2 else "两")


def _scaled(digits: str, power: int) -> str:
    return number(f"{(Decimal(digits) * 10**power).normalize():f}")


class Chinese(Reader):
    """Reads Chinese."""

    scales = r"[十百千万亿]+|(?<=\d)[kKwW](?![A-Za-z])"
    money_scales = r"(?<=\d)[MBmb]n?(?![A-Za-z])"
    per_word = f"(?=[{_HAN}])"
    money_end = "(?:人民币|元|块钱|块|美元|美金|港元|港币|欧元|英镑|日元)?"

    def __init__(self) -> None:
        super().__init__("zh")

    def read(self, text: str) -> str:
        if not _NEEDED.search(text):
            return text
        parts, end = [], 0
        for address in _WEB.finditer(text):
            parts += [self._without_addresses(text[end : address.start()]), address[0]]
            end = address.end()
        return "".join([*parts, self._without_addresses(text[end:])])

    def _without_addresses(self, text: str) -> str:
        for rule, said in _RULES:
            text = rule.sub(said, text)
        return super().read(text).replace("°", "度")

    def amount(self, it: Quantity, before: str, after: str) -> str:
        sign = "".join(_SIGNS[mark] for mark in it.sign)
        unit, per = it.unit, f"每{self._per(it.per)}" if it.per else ""
        if it.power:
            power = {"2": "的平方", "3": "的立方"}.get(it.power) or f"的{'负' * (it.power[0] == '-')}{number(it.power.lstrip('-'))}次方"
            return sign + number(it.digits) + power + (UNITS[unit].zh if unit in UNITS else "") + per
        if it.scale == "K" and it.digits in ("2", "4", "8"):
            return number(it.digits) + "K"
        if it.currency:
            return sign + self._scale(it, after) + CURRENCIES[it.currency].zh + per
        if unit in ("%", "％", "‰"):
            return sign + UNITS[unit].zh + number(it.digits) + (it.scale if it.scale else "") + per
        if unit and unit[0] in "°℃℉":
            fahrenheit = "华氏" if unit[-1] in "F℉" else ""
            return ("零下" if it.sign == "-" else sign) + fahrenheit + _counted(it.digits) + "度"
        if it.sign == "-" and after.startswith("度"):
            return "零下" + number(it.digits)
        if it.scale in ("w", "W") and not unit and not (it.scale == "W" and not _WAN.match(after)):
            return sign + _counted(it.digits) + "万"
        if it.scale == "W":
            return sign + _counted(it.digits) + "瓦"
        if unit == "s" and len(it.digits) == 2 and it.digits[1] == "0" and re.match(rf"的?[歌复风音年经怀老]", after):
            return number(it.digits) + "s"
        if unit:
            return sign + self._scale(it, after) + UNITS[unit].zh + per
        if it.scale or it.sign or not it.parts[0].isdigit():
            return sign + (self._event(it, before, after) or self._scale(it, after))
        return self._plain(it.digits, before, after)

    def _event(self, it: Quantity, before: str, after: str) -> str:
        """Return the day of an event, such as 五一 for 5.1; "" if it is none."""
        month, _, day = it.digits.partition(".")
        if it.scale or not day or not (after.startswith(_EVENTS) or "双" in before[-5:]):
            return ""
        return number(month) + (number(day) if len(month) > 1 else chinese_digits(day))

    def _per(self, per: str) -> str:
        count, unit = re.fullmatch(r"(\d*)\s?/?(.*)", per).groups()  # type: ignore[union-attr]  # matches all
        return (number(count) if count else "") + (UNITS[unit].zh if unit else "")

    def _scale(self, it: Quantity, after: str) -> str:
        power = {"k": 3, "m": 6, "b": 9, "w": 4}.get(it.scale[:1].lower(), 0)
        if power:
            return _scaled(it.digits, power)
        digits = it.digits.removesuffix(".00") if it.currency else it.digits
        counted = it.scale or it.unit or it.currency or after.startswith(_MEASURES)
        return (_counted(digits) if counted else number(digits)) + it.scale

    def _plain(self, digits: str, before: str, after: str) -> str:
        """Return a number that has nothing but its digits and the words around it."""
        if after.startswith("年") and (year := _year(digits, before, after)):
            return year
        if self._is_spelled(digits, before, after):
            return chinese_digits(digits)
        if before.endswith("第"):
            return _ordinal(digits)
        after = after.lstrip()
        return _counted(digits) if after.startswith(_MEASURES) and not after.startswith(_NOT_COUNTED) and not after.startswith("两") else number(digits)

    def _is_spelled(self, digits: str, before: str, after: str) -> bool:
        after, head = after.lstrip(), before.rstrip(" 是为:：=")
        if len(digits) == 2:
            return (digits[1] in "05" and digits[0] in "056789" and bool(_GENERATION.match(after))) or (
                before.endswith(("一米", "两米", "二米", "秒")) and not after.startswith(_MEASURES)
            )
        if len(digits) < 2 or after.startswith(("%", "％")):
            return False
        if after.startswith((*_ROOMS, *_EVENTS)):
            return True
        if after.startswith(_AMOUNTS) or after.startswith(_MEASURES):
            return False
        if digits in _KNOWN or (len(digits) == 4 and before.endswith("《")) or len(digits) > 6:
            return True
        while listed := _LIST.search(head):
            head = head[: listed.start()]
        head = head.rstrip(" 是为:：=")
        if head.endswith(_CALLS) and digits[0] in "19" and len(digits) in (3, 5):
            return True
        if head.endswith(_CODES) or (head.endswith("号") and head[-2:-1] not in "零一二三四五六七八九十百"):
            return True
        return bool(re.search(r"[A-Za-z] \Z|[A-Z]·\Z", before))

    def range(self, first: Quantity, last: Quantity, before: str, after: str, dash: str) -> str:
        if first.kind != "amount":
            return f"{self._said(first, before, '到')}到{self._said(last, '', after)}"
        plain = first.is_plain and last.is_plain
        if plain and self._is_score(before, after):
            return f"{number(first.digits)}比{number(last.digits)}"
        if plain and len(first.digits) == len(last.digits) == 4 and re.match("学?年|财年|赛季", after):
            return f"{chinese_digits(first.digits)}到{chinese_digits(last.digits)}"
        if before.endswith("第"):
            return f"{number(first.digits)}到第{number(last.digits)}"
        if first.currency == last.currency:
            first = first._replace(currency="")
        if first.unit == last.unit and first.unit not in ("%", "％", "‰") and not (first.sign and first.unit):
            first = first._replace(unit="")
        begin = self._said(first, "", "" if first.unit or first.scale else (UNITS[last.unit].zh if last.unit in UNITS else after))
        return f"{begin}到{self._said(last, '', after)}"

    def _is_score(self, before: str, after: str) -> bool:
        return before.rstrip(" :：是为").endswith(_SCORES) or after.startswith(_WINS) or bool(_LISTED.search(before))

    def date(self, it: Quantity, before: str, after: str) -> str:
        year, month, day = it.parts
        if len(year) == 2:
            year = "20" + year
        ended = "" if after.startswith(("日", "号")) else "日"
        return (f"{chinese_digits(year)}年" if year else "") + (f"{chinese(int(month))}月" if month else "") + chinese(int(day)) + ended

    def clock(self, it: Quantity, before: str, after: str) -> str:
        hour, minute, second, half = it.parts
        if not second and not half and self._is_score(before, after) and minute:
            return self.ratio(Quantity("ratio", (hour, minute)), before, after)
        hours = "两" if int(hour) == 2 else chinese(int(hour))
        if second and before.endswith(_LASTED):
            whole = f"{hours}小时" if int(hour) else ""
            return f"{whole}{chinese(int(minute))}分{number(second.lstrip('0') or '0')}秒"
        part = ""
        if half and not before.endswith(_CLOCK_BEFORE):
            late = half[0] in "pP"
            part = "晚上" if late and 5 < int(hour) < 12 else "下午" if late else "上午"
        if not int(minute or 0) and not second.strip("0"):
            return f"{part}{hours}点" if int(hour) else "零点"
        said = f"{part}{hours}点{'零' if minute[0] == '0' else ''}{chinese(int(minute))}分"
        return said + (f"{'零' if second[0] == '0' else ''}{number(second.lstrip('0'))}秒" if second.strip("0.") else "")

    def ratio(self, it: Quantity, before: str, after: str) -> str:
        return "比".join(map(number, it.parts))

    def slash(self, it: Quantity, before: str, after: str) -> str:
        whole, over, under = it.parts
        unit = UNITS[it.unit].zh if it.unit in UNITS else it.unit
        if "血压" in before[-8:] or it.unit == "mmHg":
            return f"{number(over)}，{number(under)}{unit}"
        if is_day(it) and not unit and (before.endswith(_DATES_BEFORE) or after.startswith(_DATES_AFTER)):
            return self.date(Quantity("date", ("", over, under)), before, after)
        return (f"{number(whole)}又" if whole else "") + f"{number(under)}分之{number(over)}{unit}"

    def code(self, it: Quantity, before: str, after: str) -> str:
        between = "，" if len(it.parts) > 2 else ""
        return between.join("加" if part == "+" else chinese_digits(part) for part in it.parts).replace("加，", "加")

    def version(self, it: Quantity, before: str, after: str) -> str:
        return "点".join(map(number, it.parts))

    def name(self, it: Quantity, before: str, after: str) -> str:
        """Read digits that touch Latin letters: a model or a train by its digits, a short one as a number."""
        whole, *parts = it.digits.split(".")
        if not parts and re.match("[A-Za-z]{2}", after) and not re.search("[A-Za-z]\\Z", before):
            return number(whole)
        said = chinese_digits(whole) if len(whole) > 2 or whole[0] == "0" else chinese(int(whole))
        return "点".join([said, *(map(chinese_digits, parts) if len(parts) == 1 else map(number, parts))])


def _year(digits: str, before: str, after: str) -> str:
    """Return a year by its digits; "" if it is a number of years."""
    if before.endswith(("公元前", "距今", "民国")) or _LASTING.match(after):
        return ""
    if len(digits) == 4 and digits[0] in "12":
        return chinese_digits(digits)
    return chinese_digits(digits) if len(digits) == 2 and (_BORN.match(after) or digits[0] == "0") else ""


CHINESE = Chinese()

_DASH_BETWEEN_BLANKS = re.compile(r" +[-–]+ +")
_BLANK = re.compile(r"(?<![!-~]) | (?![!-~]|\Z)")  # stays between two ASCII characters
_FULL_STOP = re.compile(r"\.+(?![0-9A-Za-z]| \d)")  # not that of "2.0.1", "example.com" and "Dec. 31"
_UNSPOKEN = str.maketrans({"²": "平方", "³": "立方"} | dict.fromkeys("（）【】()`", ""))


def cleaned(sentence: str) -> str:
    """Return `sentence` without the blanks and marks that a Chinese reader does not speak; Western full stops as
    Chinese."""
    sentence = _FULL_STOP.sub("。", _DASH_BETWEEN_BLANKS.sub("，", sentence))
    return _BLANK.sub("", sentence).translate(_UNSPOKEN)
